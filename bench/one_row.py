"""A decode step of one row that streams, each time in a process of its own: launched kernel by kernel, and recorded.

    python bench/one_row.py work=/dev/shm/penstock out=one_row.json [model=llama8b vram=6GiB steps=16 rounds=3 cases=planned,recorded]

Each case is run in turns, `rounds` times, over its plan's bytes / what copies out of the run's own DRAM give afterwards:

    planned: as the plan has it
    recorded: CUDA graphs, and copies between them

`vram=6GiB,13GiB` compares several budgets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, run_cases  # noqa: E402
from bench.hybrid import ALONE, Hybrid  # noqa: E402
from bench.keys import given_of, read_names, told_keys  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from bench.probed import profile_of  # noqa: E402
from bench.worker import Trial, Worker, opened, ran  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402

KEYS = ("work", "out", "model", "layers", "vram", "steps", "rounds", "cases")
CASES = ("planned", "recorded")
MOST = "<= 1.03"
LIMIT_S = 300.0


class Streamed(NamedTuple):
    step_s: float
    link: float
    """GB/s, as `runtime run limits=true` has it; 0 without a card."""
    recorded: bool


def measure(trial: Trial, case: str) -> Streamed:
    """In a new process. UserError as :func:`bench.worker.opened`."""
    from penstock.runtime.engine.link_limits import link_gbps

    with opened(trial, graphs=True if case == "recorded" else None) as (session, batch, device):
        step_s = ran(session, batch, device, trial.seed).step_s
        recorded = session.engine.recording.records
        session.engine.stop()
        return Streamed(step_s, link_gbps(session.engine) or 0.0, recorded)


def rows(hybrid: Hybrid, vram: str, cases: Sequence[str], rounds: int) -> Iterator[Row]:
    checkpoint = hybrid.checkpoint()
    plan = hybrid.solve(f"one-row-{vram}", checkpoint, *ALONE)
    gb = plan.placement.h2d_bytes_per_pass / 1e9
    said = plan.prediction
    for number in range(1, rounds + 1):
        for case in cases:
            worker = Worker(LIMIT_S)
            try:
                found: Streamed = worker(measure, Trial(plan, checkpoint, hybrid.steps, 0), case)
            finally:
                worker.close()
            limit_s = gb / found.link if found.link else found.step_s
            what = f"{gb / found.step_s:.2f} of {found.link:.2f} GB/s, {'recorded' if found.recorded else 'launched'}"
            taken = said.vram_bytes / 1e9, said.dram_bytes / 1e9
            predicted = said.decode_s_per_token / found.step_s
            case_of = f"{vram}, {case}, round {number}"
            yield Row(case_of, what, found.step_s, limit_s, "s", found.step_s / limit_s, MOST, predicted, *taken)


def main() -> None:
    given = given_of(sys.argv[1:], KEYS)
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    profile = profile_of(bench, "true")
    cases = read_names(given, "cases", CASES).get("cases", CASES)
    out = Path(given["out"]) if "out" in given else None
    groups = {}
    for vram in given.get("vram", "6GiB").split(","):
        hybrid = Hybrid(bench, Worker(LIMIT_S), profile, {"steps": "16", "pairs": "1", **given, "vram": vram})
        groups[vram] = partial(rows, hybrid, vram, cases, int(given.get("rounds", "3")))
    run_cases(groups, machine(profile) | {"keys": told_keys(given)}, out)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
