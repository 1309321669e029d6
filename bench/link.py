"""Each link at its limit: the cases of the benchmark table, each beside the limit that its own process measured.

    python bench/link.py work=/data/penstock out=results.json cases=dram,chunk,start,prefill,batch,ssd,packed,tmpfs,three

Makes its random checkpoints under `work` (Llama-3.1-8B geometry, 16 GB; 24 layers of 70B geometry, 41 GB) and removes them when the
next case needs the room. Every run is a process of its own; medians over its steps and requests. Cases without a GPU: `host`.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Case, Row, chosen, run_cases  # noqa: E402


class Bench:
    """Runs the two programs under ``work`` and keeps what they report."""

    def __init__(self, work: Path):
        self.work = work
        self._starts: list[Row] = []
        work.mkdir(parents=True, exist_ok=True)
        self.env = {**os.environ, "PENSTOCK_CONFIG_DIR": str(work / "config"), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}

    def call(self, program: str, *arguments: str) -> dict:
        """Run a verb; the JSON document that ends its output."""
        code = f"import sys; sys.argv[0] = {program!r}; from penstock.{program}.cli import main; main()"
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=self.env, capture_output=True, text=True)
        print(f"  {program} {arguments[0]}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
        if done.returncode:
            raise SystemExit(f"{program} {' '.join(arguments)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def probe(self, where: Path | None = None, name: str = "local", quick: str = "true") -> dict:
        """What `planner probe` says. A quick one times no decoders and no products of the CPU."""
        asked = {"path": where or self.work, "name": name, "quick": quick, "force": "true"}
        return self.call("planner", "probe", *(f"probe.{key}={value}" for key, value in asked.items()))

    def checkpoint(self, name: str, *overrides: str, where: Path | None = None) -> Path:
        """A random checkpoint, made once."""
        path = (where or self.work) / name
        if not path.exists():
            self.call("runtime", "synth", *overrides, f"out={path}")
            os.sync()
        return path

    def run(self, name: str, checkpoint: Path, solve: list[str], run: list[str], limits: bool = True) -> dict:
        """Solve and run; the report of the run."""
        plan, report = self.work / f"{name}.yaml", self.work / f"{name}.json"
        hardware = [] if any(o.startswith("hardware=") for o in solve) else ["hardware=local"]
        self.call("planner", "solve", *hardware, "model=hf", f"model.checkpoint={checkpoint}", f"out={plan}", *solve)
        self.call("runtime", "run", f"plan={plan}", f"out={report}", f"limits={limits}", *run)
        found = json.loads(report.read_text())
        self._starts += start_rows(name, found)
        return found

    def and_starts(self, case: Case) -> Iterator[Row]:
        """The rows of ``case``; then, of each of its runs, the time to load and to its first token, over what its plan predicted."""
        yield from case()
        yield from self._starts
        self._starts.clear()


def start_rows(name: str, report: dict) -> Iterator[Row]:
    for key, what in (("load_s", "loading"), ("ttft_s", "time to first token")):
        measured, predicted = report["measured"].get(key), report["predicted"].get(key)
        if measured and predicted:
            yield _row(what, name, measured, predicted, "s", measured / predicted, "", report, key, measured)


def limits_of(report: dict, key: str) -> list[float]:
    """The limit as measured before and after."""
    return [when[key] for when in report["limits"].values() if key in when]


def limit_of(report: dict, key: str) -> float:
    """The mean of the limit before and after."""
    values = limits_of(report, key)
    return sum(values) / len(values)


def link_limit(report: dict, stage: str) -> tuple[float, str]:
    """A link's limit, alone or beside the other link, whichever was higher: a drive behind a host that was awake reads faster. And the
    range of all its measurements."""
    keys = [key for key in (f"{stage}_gbps", *(k for k in BESIDE.values() if k.startswith(stage))) if limits_of(report, key)]
    values = [value for key in keys for value in limits_of(report, key)]
    return max(limit_of(report, key) for key in keys), f"{min(values):.2f}-{max(values):.2f}"


BESIDE = {"ssd": "ssd_beside_h2d_gbps", "h2d": "h2d_beside_ssd_gbps"}
"""Stage -> its rate while both links are busy."""


def stream_row(case: str, what: str, report: dict, stage: str, target: str) -> Row:
    """Bytes per token over seconds per token against the link's own limit."""
    limit, spread = link_limit(report, stage)
    rate = report["measured"][f"{stage}_bytes_per_token"] / step_s(report) / 1e9
    row = _row(case, what, rate, limit, "GB/s", rate / limit, target, report, "decode_s_per_token", step_s(report))
    return replace(row, spread=spread)


def step_s(report: dict) -> float:
    """The median decode step, the first request left out as warm-up when there are others."""
    steps, requests = report["step_s"], report["batches"]
    return median(steps[len(steps) // requests :] if requests > 1 else steps)


def bound_row(
    case: str, what: str, report: dict, key: str, target: str, beside: bool = False, step: Callable[[dict], float] = step_s
) -> Row:
    """Seconds against the slowest stage's bound at the limits that the process measured: bytes over each link's rate, and what
    computing takes when nothing moves. With ``beside`` links are taken as they are while both are busy."""
    phase = "prefill" if key == "prefill_s" else "decode"
    stages, steps = report["stages"][phase], max(1, len(report["step_s"]) if phase == "decode" else report["batches"])
    moved = {n: stages[n]["bytes"] / steps / 1e9 for n in BESIDE if stages.get(n, {}).get("bytes")}
    bounds = [gb / (limit_of(report, BESIDE[n]) if beside else link_limit(report, n)[0]) for n, gb in moved.items()]
    bounds.append(limit_of(report, "prefill_s" if phase == "prefill" else "decode_s"))
    seconds = step(report) if phase == "decode" else median(report["prefill_each_s"])
    return _row(case, what, seconds, max(bounds), "s", seconds / max(bounds), target, report, key, seconds)


def host_row(case: str, what: str, report: dict) -> Row:
    """Host time that the copier takes for one unit."""
    each = report["ring"]["issue_s"] / report["ring"]["units"] * 1e6
    return _row(case, what, each, 100, "us", each / 100, "<= 1", report, None, 0)


def _row(
    case: str, what: str, result: float, limit: float, unit: str, ratio: float, target: str, report: dict, key: str | None, seconds: float
) -> Row:
    vram, dram = (report["measured"][f"{tier}_bytes"] / 1e9 for tier in ("vram", "dram"))
    return Row(case, what, result, limit, unit, ratio, target, report["predicted"][key] / seconds if key else None, vram, dram)


def _work(prompt: int, new: int, batch: int = 1, requests: int = 4) -> list[str]:
    work = {"prompt_tokens": prompt, "new_tokens": new, "context_tokens": 0, "batch": batch, "requests": requests * batch}
    return [f"workload.{key}={value}" for key, value in work.items()]


def dram(bench: Bench) -> Iterator[Row]:
    report = bench.run("dram", bench.checkpoint("8b", "model=llama8b"), ["hardware.vram_bytes=6GiB", *_work(2048, 12)], [])
    yield stream_row("DRAM -> GPU decode", "8B, VRAM 6 GiB", report, "h2d", ">= 0.98")
    yield bound_row("prefill 2048", "8B, VRAM 6 GiB", report, "prefill_s", "<= 1.08")
    yield host_row("host time per unit", "8B, VRAM 6 GiB", report)


def chunk(bench: Bench) -> Iterator[Row]:
    """Copies of 4 MiB: what each of them costs the host is to be in the price."""
    solve = ["hardware.vram_bytes=6GiB", "force.chunk_bytes=4MiB", *_work(512, 12, requests=2)]
    report = bench.run("chunk", bench.checkpoint("8b", "model=llama8b"), solve, [])
    yield bound_row("decode, copies of 4 MiB", "8B, VRAM 6 GiB", report, "decode_s_per_token", "")


def prefill(bench: Bench) -> Iterator[Row]:
    report = bench.run("prefill", bench.checkpoint("8b", "model=llama8b"), ["hardware.vram_bytes=6GiB", *_work(8192, 4)], [])
    yield bound_row("prefill 8192", "8B, VRAM 6 GiB", report, "prefill_s", "<= 1.08")


def start(bench: Bench) -> Iterator[Row]:
    """Process start to first token with the checkpoint in the page cache, against imports + the slowest of the three that overlap: taking
    the arena, as that very process did; its bytes at the page cache's rate over all cores; its bytes at the link's rate in its passes."""
    checkpoint = bench.checkpoint("8b", "model=llama8b")
    shards = sorted(checkpoint.glob("*.safetensors"), key=lambda shard: shard.stat().st_size)
    for shard in shards:
        bare_reader_gbps(shard)
    cache_gbps = bare_reader_gbps(shards[-1])
    report = bench.run("start", checkpoint, ["hardware.vram_bytes=6GiB", *_work(512, 2, requests=1)], [], limits=False)
    phases, beside, moved = report["start_s"], report["start_beside_s"], report["start_beside_bytes"]
    h2d_gbps = max(stages["h2d"]["mbps"] or 0 for stages in report["stages"].values() if "h2d" in stages) / 1e3
    bounds = {
        "arena": beside["fault_in"] + beside["page_lock"],
        "page cache": (moved.get("page_cache", 0) + moved.get("ssd", 0)) / 1e9 / cache_gbps,
        "H2D": moved.get("h2d", 0) / 1e9 / h2d_gbps,
    }
    for figures in (phases, beside, {name: nbytes / 1e9 for name, nbytes in moved.items()}, bounds):
        print(json.dumps({k: round(v, 3) for k, v in figures.items()}), flush=True)
    total, bound = sum(phases.values()), phases["imports"] + 1.3 * max(bounds.values())
    load = report["measured"]["load_s"]
    yield _row("start, page cache warm", "8B, VRAM 6 GiB", total, bound, "s", total / bound, "<= 1", report, "load_s", load)


def batch(bench: Bench) -> Iterator[Row]:
    for size in (1, 8, 32, 96):
        solve = ["hardware.vram_bytes=12GiB", *_work(512, 32, size, 1)]
        report = bench.run(f"batch{size}", bench.checkpoint("8b", "model=llama8b"), solve, [])
        yield bound_row(f"decode batch {size}", "8B, VRAM 12 GiB", report, "decode_s_per_token", "<= 1.1")


def ssd(bench: Bench) -> Iterator[Row]:
    solve = [*SMALL, *_work(512, 6, requests=1)]
    report = bench.run("ssd", bench.checkpoint("8b", "model=llama8b"), solve, [])
    yield stream_row("SSD -> GPU decode, in place", "8B, VRAM 6, DRAM 6 GiB", report, "ssd", ">= 0.95")


def packed(bench: Bench) -> Iterator[Row]:
    with _pack(bench, bench.work) as store:
        report = bench.run("packed", store, ["hardware=packed", *SMALL, *_work(512, 8, requests=1)], [])
        yield stream_row("SSD -> GPU decode, packed", "8B, VRAM 6, DRAM 6 GiB", report, "ssd", ">= 0.97")


def tmpfs(bench: Bench) -> Iterator[Row]:
    """A store in memory stands in for a fast array; DRAM so small that the reads bind. Reads and copies share the memory's bandwidth, so
    beside the bare reader stands what both links reach together."""
    with _pack(bench, Path("/dev/shm/penstock")) as store:
        limits = [bare_reader_gbps(store / "weights.bin")]
        budgets = ["hardware.vram_bytes=6GiB", "hardware.dram_bytes=4GiB", "force.cap_layers=0"]
        solve = ["hardware=packed", *budgets, *_work(512, 16, requests=2)]
        report = bench.run("tmpfs", store, solve, [])
        limits.append(bare_reader_gbps(store / "weights.bin"))
        what = "8B, VRAM 6, DRAM 4 GiB, no layer kept"
        row = stream_row("fast SSD (tmpfs), packed", what, report, "ssd", ">= 0.92")
        bare = sum(limits) / len(limits)
        yield replace(row, limit=bare, ratio=row.result / bare)
        yield bound_row("the same, both links busy", what, report, "decode_s_per_token", "<= 1.08", beside=True)


SMALL = ("hardware.vram_bytes=6GiB", "hardware.dram_bytes=6GiB")


@contextmanager
def _pack(bench: Bench, where: Path) -> Iterator[Path]:
    """The 8B checkpoint packed under ``where``, whose drive is probed as ``hardware=packed``; removed at the end."""
    source, store = bench.checkpoint("8b", "model=llama8b"), where / "8b.packed"
    where.mkdir(parents=True, exist_ok=True)
    bench.call("runtime", "pack", f"checkpoint={source}", f"out={store}")
    try:
        bench.probe(where, "packed")
        yield store
    finally:
        shutil.rmtree(store)


def bare_reader_gbps(path: Path, block_bytes: int = 16 << 20) -> float:
    """A file read by one thread a core into memory that is there already, with nothing else going on."""
    total, threads = path.stat().st_size // block_bytes * block_bytes, os.cpu_count() or 1
    slots: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(threads):
        slot = mmap.mmap(-1, block_bytes)
        slot.write(bytes(block_bytes))
        slots.put(memoryview(slot))
    fd = os.open(path, os.O_RDONLY)

    def read(offset: int) -> None:
        slot = slots.get()
        os.preadv(fd, [slot], offset)
        slots.put(slot)

    try:
        with ThreadPoolExecutor(threads) as pool:
            begun = time.perf_counter()
            list(pool.map(read, range(0, total, block_bytes)))
            return total / (time.perf_counter() - begun) / 1e9
    finally:
        os.close(fd)


def three(bench: Bench) -> Iterator[Row]:
    shutil.rmtree(bench.work / "8b", ignore_errors=True)
    checkpoint = bench.checkpoint("70b", "model=llama70b", "model.layers=24")
    solve = ["hardware.vram_bytes=16GiB", "hardware.dram_bytes=20GiB", *_work(512, 4, requests=1)]
    report = bench.run("three", checkpoint, solve, [])
    yield bound_row("three tiers at once", "24 layers of 70B, VRAM 16, DRAM 20 GiB", report, "decode_s_per_token", "<= 1.04")


def host(bench: Bench) -> Iterator[Row]:
    checkpoint = bench.checkpoint("demo", "model=demo")
    budget = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors")) * 40 // 100
    solve = [f"hardware.dram_bytes={budget}", *_work(128, 24, requests=3)]
    store = bench.work / "demo.packed"
    if not store.exists():
        bench.call("runtime", "pack", f"checkpoint={checkpoint}", f"out={store}")
    for name, path, target in (("in place", checkpoint, ">= 0.85"), ("packed", store, ">= 0.95")):
        report = bench.run("host", path, solve, [])
        yield stream_row(f"SSD -> CPU decode, {name}", "1.2 GB, DRAM 40 %", report, "ssd", target)
        yield bound_row(f"CPU prefill 128, {name}", "1.2 GB, DRAM 40 %", report, "prefill_s", "")


CASES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    f.__name__: f for f in (host, dram, chunk, start, prefill, batch, ssd, packed, tmpfs, three)
}


def machine(profile: dict) -> dict:
    """What this ran on."""
    return {
        "gpu": profile["gpu"] and profile["gpu"]["name"],
        "cores": profile["cpu"]["cores"],
        "dram_gb": profile["dram_bytes"] / 1e9,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    cases = chosen(given.get("cases", "host"), {name: partial(bench.and_starts, partial(case, bench)) for name, case in CASES.items()})
    run_cases(cases, machine(bench.probe()), Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
