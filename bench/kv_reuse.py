"""What restoring a prefix takes, beside its bound: bytes over the rate of their tier, and computing the rest.

    python bench/kv_reuse.py work=/data/penstock out=kv_reuse.json
    python bench/kv_reuse.py checkpoint=DIR prefix_tokens=512,1024 store_bytes=1GiB

Without `checkpoint` one is made under `work` with random weights of `model`'s geometry. Every row's process measures its bounds itself:
the rates of VRAM, link and disk for as many bytes, and, beside each sample, a prefill of the tail over a context that is simply there.
Predictions are the cost model's, with the disk's rate and the host's launch rate in that process; what it says with the probe's launch
rate stands beside. Runs without a GPU, too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bench.keys import given_of, read_names, read_values  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.common.measures import show_bytes  # noqa: E402
from penstock.planner.contract.decided.decisions import KvReuse  # noqa: E402
from penstock.planner.contract.plan.planfile import check_plan, read_plan, write_plan  # noqa: E402

PROCESSES = {"ttft": ("ttft",), "writeback": ("writeback",), "restart": ("fill", "restart")}
"""Of each case, one after the other; the last one measures."""
NAMES = {"vram": "VRAM (L1)", "dram": "DRAM (L2)", "ssd": "disk (L3)"}


@dataclass(frozen=True)
class Request:
    """The command's keys."""

    work: Path = Path("bench-work/kv-reuse")
    """Where the checkpoint, the plans and the machine's profile go."""
    out: Path = Path("kv_reuse.json")
    checkpoint: Path | None = None
    model: str = "llama8b"
    """Geometry of the checkpoint that is made when none is given."""
    dir: Path | None = None
    """Directory of the pages, emptied at first; under `work` by default."""
    cases: tuple[str, ...] = tuple(PROCESSES)
    prefix_tokens: tuple[int, ...] = (4096, 32768)
    tail_tokens: int = 64
    page_tokens: int = 256
    new_tokens: int = 128
    """Decoded beside the write-back."""
    repeats: int = 5
    store_bytes: int = 10 << 30
    """Of the directory that the restart finds."""
    seed: int = 0
    limit_s: int = 600
    """Longest life of a row's process, loading included."""

    @classmethod
    def read(cls, arguments: Iterable[str]) -> Request:
        """From ``key=value`` arguments. UserError for an unknown key or a value that cannot be."""
        given = given_of(arguments, [f.name for f in fields(cls)])
        whole = {"tail_tokens": 1, "page_tokens": 16, "new_tokens": 2, "repeats": 1, "seed": 0, "limit_s": 1}
        values = read_values(given, ("work", "out", "checkpoint", "dir"), ("store_bytes",), whole)
        if "prefix_tokens" in given:
            lengths = [read_values({"prefix_tokens": n}, (), (), {"prefix_tokens": 1}) for n in given["prefix_tokens"].split(",")]
            values["prefix_tokens"] = tuple(length["prefix_tokens"] for length in lengths)
        if "model" in given:
            values["model"] = given["model"]
        made = cls(**values, **read_names(given, "cases", PROCESSES))
        short = min(made.prefix_tokens)
        if short < made.page_tokens:
            raise UserError(f"prefix_tokens={short}: no full page of page_tokens={made.page_tokens}; raise it, or lower page_tokens")
        return made


@dataclass(frozen=True)
class Row:
    """A line of the table. ``ratio`` is result over bound, ``predicted`` is predicted over measured."""

    case: str
    what: str
    result: float
    bound: float
    unit: str
    target: str
    predicted: float | None = None
    beside: str = ""

    @property
    def ratio(self) -> float:
        return self.result / self.bound


def measure(request: Request) -> dict[str, Any]:
    """Make what is missing, run every case in a process of its own; the document that was written after each."""
    bench = Bench(request.work)
    profile = bench.probe()
    checkpoint = request.checkpoint or bench.checkpoint(request.model, f"model={request.model}")
    directory = request.dir or request.work / "pages"
    document: dict[str, Any] = {
        "machine": machine(profile),
        "work": {key: value for key, value in asdict(request).items() if not isinstance(value, Path)} | {"checkpoint": checkpoint.name},
        "measured": [],
        "rows": [],
    }
    for prefix_tokens in request.prefix_tokens:
        plan = make_plan(bench, request, checkpoint, prefix_tokens)
        for case in request.cases:
            shutil.rmtree(directory, ignore_errors=True)
            for process in PROCESSES[case]:
                got = run_case(process, plan, request, checkpoint, directory, prefix_tokens, bench.env)
                if "message" in got:
                    break
            else:
                document["rows"] += [asdict(row) | {"ratio": row.ratio} for row in ROWS[case](prefix_tokens, got)]
            document["measured"].append({"case": case, "prefix_tokens": prefix_tokens} | got)
            request.out.parent.mkdir(parents=True, exist_ok=True)
            request.out.write_text(json.dumps(document, indent=1) + "\n")
        shutil.rmtree(directory, ignore_errors=True)
    return document


def make_plan(bench: Bench, request: Request, checkpoint: Path, prefix_tokens: int) -> Path:
    """A plan for one prompt after the other, with room for the prefix's pages in DRAM and, where VRAM has it, in VRAM."""
    path = request.work / f"plan-{prefix_tokens}.yaml"
    work = {"prompt_tokens": prefix_tokens + request.tail_tokens, "new_tokens": request.new_tokens, "context_tokens": 0, "batch": 1}
    work["requests"] = 1
    given = ["hardware=local", "model=hf", f"model.checkpoint={checkpoint}", f"force.page_tokens={request.page_tokens}"]
    bench.call("planner", "solve", *given, f"out={path}", *(f"workload.{key}={value}" for key, value in work.items()))
    solved = read_plan(path)
    pages = -(-prefix_tokens // request.page_tokens)
    in_dram = pages + 4 * solved.decisions.weights.ssd.queue_depth  # some wait for the disk while others are read
    for in_vram in (pages + 1 if solved.hardware.gpu else 0, 0):
        reuse = KvReuse(in_vram, in_dram, 0)
        plan = replace(solved, decisions=replace(solved.decisions, kv=replace(solved.decisions.kv, reuse=reuse)))
        try:
            check_plan(plan)
        except UserError:
            if not in_vram:
                raise
            continue
        write_plan(plan, path)
        break
    return path


def run_case(
    case: str, plan: Path, request: Request, checkpoint: Path, directory: Path, prefix_tokens: int, env: Mapping[str, str]
) -> dict[str, Any]:
    """What a process of its own measured, or under ``message`` the line that it ended with."""
    words = {"case": case, "plan": plan, "checkpoint": checkpoint, "dir": directory, "prefix_tokens": prefix_tokens}
    words |= {key: getattr(request, key) for key in ("tail_tokens", "new_tokens", "repeats", "store_bytes", "seed")}
    command = [sys.executable, str(Path(__file__).resolve()), *(f"{key}={value}" for key, value in words.items())]
    try:
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=request.limit_s)
    except subprocess.TimeoutExpired:
        return {"message": f"cut after {request.limit_s} s (limit_s)"}
    if done.returncode:
        return {"message": next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"status {done.returncode}")}
    return json.loads(done.stdout.splitlines()[-1])


def do_case(given: Mapping[str, str]) -> dict[str, Any]:
    """What the process of a case does."""
    plan, checkpoint, directory = read_plan(Path(given["plan"])), Path(given["checkpoint"]), Path(given["dir"])
    from bench.kv_cases import fill_store, measured_restart, measured_ttft, measured_writeback
    from bench.kv_rig import device_of, opened

    whole = ("prefix_tokens", "tail_tokens", "new_tokens", "repeats", "store_bytes", "seed")
    prefix, tail, new, repeats, store_bytes, seed = (int(given[key]) for key in whole)
    with opened(plan, checkpoint, directory, *device_of(plan)) as rig:
        match given["case"]:
            case "ttft":
                return measured_ttft(rig, prefix, tail, repeats, seed)
            case "writeback":
                return measured_writeback(rig, prefix, new, repeats, seed)
            case "fill":
                return fill_store(rig, prefix, store_bytes, seed)
            case _:
                return measured_restart(rig, prefix, tail, seed)


def ttft_rows(prefix_tokens: int, got: Mapping[str, Any]) -> Iterator[Row]:
    for tier, figures in got["tiers"].items():
        moved = f"{show_bytes(got['restored_bytes'])} " + (f"at {figures['tier_gbps']:.2f} GB/s" if figures["tier_gbps"] else "shared")
        launch = f"{1e3 * figures['layer_launch_s']:.2f} ms/layer; by probe {figures['predicted_by_probe_s'] / figures['ttft_s']:.3f}"
        beside = f"{moved} + {figures['tail_s']:.4f} s; cold {got['cold_s']:.3f} s; {launch}"
        predicted = figures["predicted_s"] / figures["ttft_s"]
        yield Row(
            "TTFT",
            f"{prefix_tokens} in {NAMES[tier]}",
            figures["ttft_s"],
            figures["bound_s"],
            "s",
            "<= 1.15" if figures["tier_gbps"] else "<= 1.10",
            predicted,
            beside,
        )


def writeback_rows(prefix_tokens: int, got: Mapping[str, Any]) -> Iterator[Row]:
    """The 3 % that are allowed concern steps; what is left of them after the last token lengthens the batch."""
    during, without = got["during"], got["without"]
    steps, batches = ((during[key]["median"], without[key]["median"]) for key in ("step_s", "batch_s"))
    compared = f"{got['repeats']} of each in shuffled order"
    spread = f"{_range(during['step_s'])}, without {_range(without['step_s'])}; first {got['steps']} steps, {compared}"
    yield Row("decode during write-back", f"{prefix_tokens} tokens", *steps, "s", "<= 1.03", None, spread)
    left, finish_s = got["pages_at_the_end"]["median"], got["finish_s"]["median"]
    each = f"{finish_s / left:.4f} s each" if left else "none"
    at_end = f"at its end {finish_s:.4f} s ({got['finish_share']['median']:.1%}) for {left:g} of {got['pages_captured']} pages, {each}"
    beside = f"{at_end}, {got['pages_skipped']} skipped; {_range(during['batch_s'])}, without {_range(without['batch_s'])}"
    yield Row("batch with write-back", f"{prefix_tokens} tokens", *batches, "s", "", None, beside)


def _range(spread: Mapping[str, float]) -> str:
    return f"{spread['least']:.4f} to {spread['most']:.4f} s"


def restart_rows(prefix_tokens: int, got: Mapping[str, Any]) -> Iterator[Row]:
    store = f"store of {show_bytes(got['store_bytes'])}"
    yield Row("index open", store, got["open_s"], 1.0, "s", "<= 1", None, f"index {show_bytes(got['index_bytes'])}")
    beside = f"to the first token {got['open_s'] + got['ttft_s']:.3f} s"
    yield Row("read beside what is restored", store, got["read_bytes"] / 1e9, got["restored_bytes"] / 1e9, "GB", "= 1", None, beside)


ROWS = {"ttft": ttft_rows, "writeback": writeback_rows, "restart": restart_rows}


def show(document: Mapping[str, Any]) -> None:
    """The table, and under it what could not be measured."""
    where, work = document["machine"], document["work"]
    console = Console(width=200, highlight=False, markup=False)
    console.print(f"{work['checkpoint']}, pages of {work['page_tokens']} tokens, tail of {work['tail_tokens']}", soft_wrap=True)
    what = f"{where['gpu'] or 'no GPU'}, {where['cores']} cores, {where['dram_gb']:.0f} GB DRAM, {where['date']}"
    console.print(f"{what}; torch {where['torch']}, transformers {where['transformers']}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in {"": "left", "of": "left", **dict.fromkeys(("result", "bound", "ratio", "target", "pred/meas"), "right")}.items():
        table.add_column(name, justify=justify, no_wrap=True)
    table.add_column("bound is", no_wrap=True)
    for row in document["rows"]:
        predicted = "" if row["predicted"] is None else f"{row['predicted']:.3f}"
        figures = (f"{row['result']:.4f}", f"{row['bound']:.4f}", f"{row['ratio']:.3f}", row["target"], predicted)
        table.add_row(row["case"], f"{row['what']}, {row['unit']}", *figures, row["beside"])
    console.print(table)
    for got in document["measured"]:
        if "message" in got:
            console.print(f"{got['case']} with {got['prefix_tokens']} tokens: {got['message']}", soft_wrap=True)


def main() -> None:
    arguments = sys.argv[1:]
    given = dict(a.partition("=")[::2] for a in arguments)
    try:
        if "case" in given:
            print(json.dumps(do_case(given)))
            return
        request = Request.read(arguments)
        document = measure(request)
        show(document)
        line = {f"{row['case']}, {row['what']}": round(row["ratio"], 4) for row in document["rows"]}
        print(json.dumps({"report": str(request.out), "ratio": line}, separators=(",", ":")))
    except UserError as error:
        print(f"kv_reuse: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
