"""A decode step of one row that streams, each time in a process of its own: some take a twentieth longer than others, and why?

    python bench/one_row.py work=/dev/shm/penstock out=one-row.json [model=llama8b vram=6GiB steps=16 rounds=3 cases=classes,one,launched]

Each case is run in turns, `rounds` times, over its plan's bytes / what copies out of the run's own DRAM give afterwards:

    classes: as it is, copies of attention and of FFNs are a chain each, on a stream each
    one: all copies are one chain, in the order in which slots become free
    launched: kernel by kernel, copies in the model's order on one stream

A row also says what the link gives to copies of half a slot, back to back on one stream, and on two streams at the same time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, run_cases  # noqa: E402
from bench.hybrid import ALONE, Hybrid, profile_of  # noqa: E402
from bench.keys import given_of, read_names  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from bench.worker import Trial, Worker, opened, ran  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.contract.decided.placement import Unit  # noqa: E402

if TYPE_CHECKING:
    from penstock.runtime.engine.engine import Engine

KEYS = ("work", "out", "model", "layers", "vram", "steps", "rounds", "cases")
CASES = ("classes", "one", "launched")
MOST = "<= 1.03"
COPYING_S = 1.0
LIMIT_S = 300.0


class Streamed(NamedTuple):
    """Seconds of a step, and GB/s of its link: as `runtime run limits=true` has it, and of half slots on one and on two streams."""

    step_s: float
    link: float
    one: float
    two: float


def measure(trial: Trial, case: str) -> Streamed:
    """In a new process. UserError as :func:`bench.worker.opened`."""
    from penstock.runtime.engine.link_limits import link_gbps
    from penstock.runtime.recorded import recorded_stream

    if case == "one":
        recorded_stream.chain_of = FirstOfAll()  # type: ignore[assignment]
    with opened(trial, graphs=case != "launched") as (session, batch, device):
        step_s = ran(session, batch, device, trial.seed).step_s
        recorded = session.engine.facts()["graphs"]
        session.engine.stop()
        links = link_gbps(session.engine) or 0.0, *(copied_gbps(session.engine, streams) for streams in (1, 2))
    if device.type == "cuda" and (case == "launched") is not (recorded is None):
        raise SystemExit(f"{case}: steps were {'launched' if recorded is None else 'recorded'}")
    return Streamed(step_s, *links)


class FirstOfAll:
    """Names every unit's chain as the first one's."""

    def __init__(self) -> None:
        self._name: str | None = None

    def __call__(self, unit: Unit) -> str:
        self._name = self._name or unit.ring_class
        return self._name


def copied_gbps(engine: Engine, streams: int) -> float:
    """Of copies of half a slot out of the arena, on so many streams at the same time."""
    import torch

    into = engine.link_target
    if into is None or not into.is_cuda:
        return 0.0
    size = into.numel() // 2
    sources = [engine.arena.slice(at, size) for at in range(0, engine.arena.nbytes - size + 1, size)]
    each = [torch.cuda.Stream(into.device) for _ in range(streams)]
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < COPYING_S:
        for source in sources:
            with torch.cuda.stream(each[count % streams]):
                into[count % 2 * size :][:size].copy_(source, non_blocking=True)
            count += 1
        torch.cuda.synchronize(into.device)
    return count * size / (time.perf_counter() - begun) / 1e9


def rows(hybrid: Hybrid, cases: Sequence[str], rounds: int) -> Iterator[Row]:
    checkpoint = hybrid.checkpoint()
    plan = hybrid.solve("one-row", checkpoint, *ALONE)
    gb = sum(plan.placement.unit_bytes(unit) for unit in plan.placement.streamed_units) / 1e9
    said = plan.prediction
    for number in range(1, rounds + 1):
        for case in cases:
            worker = Worker(LIMIT_S)
            try:
                found: Streamed = worker(measure, Trial(plan, checkpoint, hybrid.steps, 0), case)
            finally:
                worker.close()
            limit_s = gb / found.link if found.link else found.step_s
            what = f"{gb / found.step_s:.2f} of {found.link:.2f} GB/s; half slots on one stream {found.one:.2f}, on two {found.two:.2f}"
            taken = said.vram_bytes / 1e9, said.dram_bytes / 1e9
            predicted = said.decode_s_per_token / found.step_s
            yield Row(f"{case}, round {number}", what, found.step_s, limit_s, "s", found.step_s / limit_s, MOST, predicted, *taken)


def main() -> None:
    given = given_of(sys.argv[1:], KEYS)
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    profile = profile_of(bench, "true")
    hybrid = Hybrid(bench, Worker(LIMIT_S), profile, {"steps": "16", "pairs": "1", **given})
    cases = read_names(given, "cases", CASES).get("cases", CASES)
    out = Path(given["out"]) if "out" in given else None
    run_cases({"one row": partial(rows, hybrid, cases, int(given.get("rounds", "3")))}, machine(profile) | {"keys": dict(given)}, out)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
