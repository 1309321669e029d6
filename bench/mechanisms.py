"""What each mechanism buys: the same work with one after the other put in, each row in a process of its own under the same VRAM budget.

    python bench/mechanisms.py checkpoint=DIR vram_bytes=6GiB out=mechanisms.json
    python bench/mechanisms.py draw=mechanisms.json

Needs a GPU and DRAM for the whole checkpoint. The figures go to `out` (JSON) after every row, and into a picture beside it (PNG;
`draw=` makes it from a JSON elsewhere). A row that fails or takes longer than `limit_s` stands in the table with its message.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bench.handicaps import CASES, Measured, measure  # noqa: E402
from bench.keys import given_keys, read_names, read_values  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.common.measures import GB, show_bytes  # noqa: E402
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint  # noqa: E402
from penstock.planner.contract.plan.planfile import read_plan  # noqa: E402


@dataclass(frozen=True)
class Request:
    """The command's keys."""

    checkpoint: Path
    out: Path = Path("mechanisms.json")
    work: Path = Path("bench-work/mechanisms")
    """Where the plan and the machine's profile go."""
    rows: tuple[str, ...] = tuple(CASES)
    vram_bytes: int = 6 << 30
    prompt_tokens: int = 2048
    new_tokens: int = 8
    seed: int = 0
    limit_s: int = 300
    """Longest life of a row's process, loading included."""

    @classmethod
    def read(cls, arguments: Iterable[str]) -> Request:
        """From ``key=value`` arguments. UserError for an unknown key or a value that cannot be."""
        given = given_keys(arguments, [f.name for f in fields(cls)])
        whole = {"prompt_tokens": 1, "new_tokens": 2, "seed": 0, "limit_s": 1}
        values = read_values(given, ("checkpoint", "out", "work"), ("vram_bytes",), whole)
        return cls(**values, **read_names(given, "rows", CASES))


@dataclass(frozen=True)
class Row:
    """A line of the table: a case and what it measured, or the one line that says why not."""

    name: str
    message: str = ""
    measured: Measured | None = None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Row:
        return cls(row["name"], row["message"], row["measured"] and Measured(**row["measured"]))

    @property
    def title(self) -> str:
        return CASES[self.name].title


def compare(request: Request) -> dict[str, Any]:
    """Plan once, run every row; the document that was written."""
    spec_from_checkpoint(request.checkpoint)
    bench = Bench(request.work)
    profile = bench.probe()
    if not profile["gpu"]:
        raise UserError("no GPU here: there is no link to copy over")
    work = {"prompt_tokens": request.prompt_tokens, "new_tokens": request.new_tokens, "batch": 1, "requests": 1}
    plan = request.work / "plan.yaml"
    given = [f"hardware.vram_bytes={request.vram_bytes}", *(f"workload.{key}={value}" for key, value in work.items())]
    bench.call("planner", "solve", "hardware=local", "model=hf", f"model.checkpoint={request.checkpoint}", f"out={plan}", *given)
    size = sum(f.stat().st_size for f in request.checkpoint.glob("*.safetensors"))
    asked = {
        "checkpoint": request.checkpoint.name,
        "checkpoint_bytes": size,
        "vram_bytes": request.vram_bytes,
        "seed": request.seed,
        **work,
    }
    document: dict[str, Any] = {"machine": machine(profile), "work": asked, "rows": []}
    for name in request.rows:
        row = run_row(name, plan, request, bench.env)
        print(f"{row.title}: {row.message or 'done'}", flush=True)
        document["rows"].append(asdict(row))
        request.out.parent.mkdir(parents=True, exist_ok=True)
        request.out.write_text(json.dumps(document, indent=1) + "\n")
    return document


def run_row(name: str, plan: Path, request: Request, env: Mapping[str, str]) -> Row:
    """One row in a process of its own. Never raises for what the row does."""
    command = [sys.executable, str(Path(__file__).resolve()), f"row={name}", f"plan={plan}", f"checkpoint={request.checkpoint}"]
    try:
        done = subprocess.run([*command, f"seed={request.seed}"], env=env, capture_output=True, text=True, timeout=request.limit_s)
    except subprocess.TimeoutExpired:
        return Row(name, f"cut after {request.limit_s} s (limit_s)")
    if done.returncode:
        return Row(name, next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"status {done.returncode}"))
    return Row(name, measured=Measured(**json.loads(done.stdout.splitlines()[-1])))


def do_row(name: str, plan_file: Path, checkpoint: Path, seed: int) -> Measured:
    """What the process of a row does."""
    import torch

    from penstock.runtime.asked.prompts import random_ids
    from penstock.runtime.engine.generate import Batch
    from penstock.runtime.memory.cuda import open_cuda

    plan = read_plan(plan_file)
    device = torch.device("cuda", 0)
    prompts = random_ids(1, plan.workload.prompt_tokens, plan.model.vocab, seed)
    batch = Batch(prompts, plan.workload.new_tokens, plan.workload.max_tokens, plan.decisions.prefill_chunk_tokens)
    return measure(CASES[name], plan, checkpoint, open_cuda(plan, device), device, batch)


def times_faster(row: Row, rows: Sequence[Row], key: str) -> float | None:
    """Seconds of the row that ``row`` is compared with, over its own."""
    beside = next((r.measured for r in rows if r.name == CASES[row.name].beside), None)
    return getattr(beside, key) / getattr(row.measured, key) if beside and row.measured else None


def describe(document: Mapping[str, Any]) -> str:
    """Two lines: the work, and what it ran on."""
    work, where = document["work"], document["machine"]
    what = f"{work['checkpoint']} ({show_bytes(work['checkpoint_bytes'])}), VRAM budget {show_bytes(work['vram_bytes'])}, batch 1"
    what += f", prompt {work['prompt_tokens']}, {work['new_tokens']} new tokens"
    versions = f"torch {where['torch']}, transformers {where['transformers']}"
    return f"{what}\n{where['gpu']}, {where['cores']} cores, {where['dram_gb']:.0f} GB DRAM, {where['date']}; {versions}"


def show(rows: Sequence[Row], caption: str) -> None:
    """The table, and under it why some rows have no figures."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    names = ("prefill s", "times", "decode s/token", "times", "H2D/token", "GB/s", "limit", "of limit", "waits/pass", "locked", "resident")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        m = row.measured
        if m is None:
            table.add_row(row.title, "no figures")
            continue
        faster = {key: times_faster(row, rows, key) for key in ("prefill_s", "decode_s")}
        prefill, decode = ("" if value is None else f"{value:.2f}" for value in faster.values())
        figures = (f"{m.prefill_s:.3f}", prefill, f"{m.decode_s:.4f}", decode, show_bytes(round(m.h2d_bytes_per_token)), f"{m.gbps:.1f}")
        rest = (f"{m.limit_gbps:.1f}", f"{m.gbps / m.limit_gbps:.1%}", f"{m.waits_per_pass:.1f}", f"{m.locked_share:.0%}")
        table.add_row(row.title, *figures, *rest, show_bytes(m.resident_bytes))
    console = Console(width=200, highlight=False, markup=False)
    console.print(caption, soft_wrap=True)
    console.print(table)
    console.print("times: seconds of the row before, for a row with -, of the whole, over this row's")
    for row in rows:
        if row.message:
            console.print(f"{row.title}: {row.message}", soft_wrap=True)


def draw(rows: Sequence[Row], caption: str, path: Path) -> None:
    """Bars of seconds, a mark on each where its bytes alone would be at the link's limit. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(13, 1.8 + 0.45 * len(rows)), sharey=True, layout="constrained")
    for axes, key, title in zip(panels, ("prefill_s", "decode_s"), ("prefill, seconds", "decode, seconds per token"), strict=True):
        for place, row in enumerate(rows):
            if row.measured is None:
                axes.text(0, place, f" {row.message[:70]}", va="center", fontsize=8)
                continue
            seconds, bound = getattr(row.measured, key), row.measured.h2d_bytes_per_token / GB / row.measured.limit_gbps
            axes.barh(place, seconds, color="tab:gray" if row.title.startswith("-") else "tab:blue")
            axes.plot([bound, bound], [place - 0.4, place + 0.4], color="tab:orange", linewidth=2)
            axes.text(seconds, place, f" {seconds:.3g} s", va="center", fontsize=8)
        axes.set_title(title)
        axes.set_yticks(range(len(rows)), [row.title for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"orange: the row's own bytes at its process's limit of the link\n{caption}", fontsize=8, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def present(document: Mapping[str, Any], json_path: Path) -> None:
    """The table, the picture where matplotlib is installed, and one JSON line."""
    rows, caption = [Row.from_json(row) for row in document["rows"]], describe(document)
    show(rows, caption)
    picture: Path | None = json_path.with_suffix(".png")
    try:
        draw(rows, caption, picture)
    except ImportError as error:
        print(f"no picture ({error}): draw it where matplotlib is, python bench/mechanisms.py draw={json_path.name}")
        picture = None
    line = {row.name: row.measured.decode_s if row.measured else row.message for row in rows}
    print(json.dumps({"report": str(json_path), "picture": picture and str(picture), "decode_s": line}, separators=(",", ":")))


def main() -> None:
    arguments = sys.argv[1:]
    first = dict(a.partition("=")[::2] for a in arguments)
    try:
        if "draw" in first:
            present(json.loads(Path(first["draw"]).read_text()), Path(first["draw"]))
        elif "row" in first:
            print(json.dumps(asdict(do_row(first["row"], Path(first["plan"]), Path(first["checkpoint"]), int(first["seed"])))))
        else:
            request = Request.read(arguments)
            present(compare(request), request.out)
    except UserError as error:
        print(f"mechanisms: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
