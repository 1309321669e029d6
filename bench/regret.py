"""How good plans are: a plan against its neighbours, each run for real, in shuffled order.

    python bench/regret.py work=bench-work budgets=:400MB,:600MB,:850MB repeats=2 steps=5 out=regret.json     # without a GPU: DRAM alone
    python bench/regret.py work=/data/penstock checkpoint=DIR out=regret.json repeats=2 batch=4 seconds=140 points=26 \\
        budgets=DRAM-bound@2GiB:12GiB,SSD-bound@2GiB:2GiB,mixed@2GiB:2700MB

For each regime (NAME@VRAM:DRAM or VRAM:DRAM) the solver's plan, as it is, and the fastest where it took a simple one; that plan with one
decision moved (cap, HWM, distance, policy, residents, slots, block, depth, chunk, copies in flight, expert slots); the plan solved around
one decision that is forced, the batch among them; and what accelerate and llama.cpp would place where, executed by this engine. Regret is
the plan's step over the best one measured; predicted over measured stands beside each point, their rank correlation and the spread of the
repeats below.

All points run in one worker process by the engine of `runtime run`, an engine each: each repeat of all in an order of its own, medians
over steps and repeats. `points=` is the most of a regime, `seconds=` how long each regime may take, `point_s=` about how long the passes
of a slow point: it gets fewer steps than `steps=`, two at least. After the repeats the plan and the best others are run `finals=` times
more. A point that fails, or that was not reached in time, is a row with the reason.

Without a checkpoint the demo geometry of 1.2 GB is made. One for a GPU, 3.9 GB of layers whose bytes take five times their launches:

    runtime synth model=llama8b model.layers=24 model.hidden=3072 model.ffn=5120 model.heads=24 model.vocab=32768 out=DIR
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.keys import given_of, read_values  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from bench.neighbourhood import OURS, Point, neighbourhood, peers, sampled  # noqa: E402
from bench.regret_report import document, draw, show  # noqa: E402
from bench.worker import WARM_UP, Failed, Measured, Trial, Worker, infer_device_map, measure  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.contract.plan.planfile import read_plan  # noqa: E402

NUMBERS = {"repeats": 1, "steps": 2, "prompt": 1, "seed": 0, "batch": 1, "seconds": 1, "points": 1, "point_s": 1, "finals": 0}
"""Keys that are whole numbers, with the least of each."""
USUAL = {"repeats": 3, "steps": 8, "prompt": 128, "seed": 0, "batch": 1, "seconds": None, "points": None, "point_s": 4, "finals": 3}
KEYS = ("work", "checkpoint", "budgets", "out", *NUMBERS)
FEWEST_STEPS = 2
FINALISTS = 2
"""Best points beside the plan that are run again at the end."""
HANG_S = 60.0
"""A point that takes longer is given up."""


@dataclass(frozen=True)
class Regime:
    """Budgets as a user wrote them; ``name`` stands in the report."""

    name: str
    vram: str
    dram: str

    @classmethod
    def parse(cls, text: str) -> Regime:
        """``NAME@VRAM:DRAM`` or ``VRAM:DRAM``; an empty size is the machine's own."""
        name, at, sizes = text.rpartition("@")
        vram, colon, dram = sizes.partition(":")
        if not colon or (at and not name):
            raise UserError(f"budgets={text}: must be VRAM:DRAM or NAME@VRAM:DRAM, such as mixed@2GiB:3GiB")
        return cls(name or sizes, vram, dram)


class Study:
    """Runs the points of one regime after the other, in the time that each has."""

    def __init__(self, run: Callable[[Point], Measured], asked: dict[str, Any], clock: Callable[[], float] = time.monotonic):
        self._run = run
        self._asked = asked
        self._clock = clock
        self._random = random.Random(asked["seed"])

    def measure(self, points: Sequence[Point]) -> None:
        """Measure the points of a regime; the first is the plan, run once before the clock starts to load what comes on demand."""
        plan = points[0]
        self._attempt(plan, [])
        plan.prefills_s.clear()
        begun, spent = self._clock(), []
        end = begun + (self._asked["seconds"] or float("inf"))
        for number in range(self._asked["repeats"]):
            order = [p for p in points if p.error is None]
            self._random.shuffle(order)
            if number == 0:
                order.sort(key=lambda p: p is not plan)
            for k, point in enumerate(order, 1):
                rest = self._asked["finals"] * (1 + FINALISTS) * max(spent, default=0.0)
                if self._clock() + rest > end:
                    if not point.steps_s:
                        point.error = f"not reached in seconds={self._asked['seconds']}"
                    continue
                tried = self._clock()
                self._attempt(point, point.steps_s)
                if point is plan:
                    spent.append(self._clock() - tried)
                told = f"repeat {number + 1}/{self._asked['repeats']} {k}/{len(order)} {point.regime} {point.name:40.40}"
                print(f"\r{told}", end="", file=sys.stderr, flush=True)
        self._finals(points, end)
        print(f"\n{plan.regime}: {self._clock() - begun:.0f} s", file=sys.stderr)

    def _finals(self, points: Sequence[Point], end: float) -> None:
        """The plan and the best others again, as often as there is time: among many, some were best by luck."""
        others = sorted((p for p in points[1:] if p.steps_s and p.error is None), key=lambda p: p.measured_s)[:FINALISTS]
        for _ in range(self._asked["finals"] if points[0].steps_s and others else 0):
            if self._clock() > end:
                break
            for point in self._random.sample([points[0], *others], 1 + len(others)):
                self._attempt(point, point.finals_s)

    def _attempt(self, point: Point, into: list[float]) -> None:
        """Run ``point`` once, its step ``into``. What it fails with is its error, and it is not tried again."""
        if point.error is not None:
            return
        try:
            measured = self._run(point)
        except (UserError, Failed) as error:
            point.error = str(error)
            return
        into.append(measured.step_s * point.waves)
        point.prefills_s.append(measured.prefill_s * point.waves)


def steps_of(predicted_s: float, most: int, point_s: float) -> int:
    """Measured steps of a point whose passes are to take about ``point_s`` in all."""
    return max(FEWEST_STEPS, min(most, round(point_s / predicted_s) - WARM_UP - 1))


def run_point(worker: Worker, checkpoint: Path, asked: dict[str, Any], point: Point) -> Measured:
    steps = steps_of(point.plan.prediction.decode_s_per_token, asked["steps"], asked["point_s"])
    return worker(measure, Trial(point.plan, checkpoint, steps, asked["seed"]))


def points_of(regime: Regime, bench: Bench, checkpoint: Path, worker: Worker, asked: dict[str, Any]) -> list[Point]:
    """The plan of ``regime`` first, its neighbours, the peers' placements."""
    sizes = {"vram": regime.vram, "dram": regime.dram}
    keys = [f"hardware.{tier}_bytes={size}" for tier, size in sizes.items() if size]
    work = {"prompt_tokens": asked["prompt"], "new_tokens": asked["steps"] + WARM_UP + 1, "context_tokens": 0, "batch": asked["batch"]}
    keys += [f"workload.{key}={value}" for key, value in (work | {"requests": asked["batch"]}).items()]
    path = bench.work / f"regret-{regime.name.replace(':', '-')}.yaml"
    try:
        bench.call("planner", "solve", "hardware=local", "model=hf", f"model.checkpoint={checkpoint}", f"out={path}", *keys)
    except SystemExit as refused:  # the other regimes may have plans
        return [Point(regime.name, OURS, None, error=str(refused).strip().splitlines()[-1])]
    plan = read_plan(path)

    def infer(room: dict[int | str, int]) -> dict[str, int | str]:
        try:
            return worker(infer_device_map, checkpoint, room)
        except Failed as error:
            raise UserError(str(error)) from error

    around = [*neighbourhood(regime.name, plan), *peers(regime.name, plan, infer)]
    kept = sampled(around, asked["points"], asked["seed"])
    print(f"{regime.name}: {len(kept)} points of {len(around)}, {OURS} predicted {plan.prediction.decode_s_per_token:.4f} s", flush=True)
    return kept


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
        asked = USUAL | read_values(given, ("checkpoint",), (), NUMBERS)
        regimes = [Regime.parse(text) for text in given.get("budgets", ":400MB,:600MB,:850MB").split(",")]
    except UserError as error:
        raise SystemExit(str(error)) from None
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    profile = bench.probe()
    checkpoint = asked.get("checkpoint") or bench.checkpoint("demo", "model=demo")
    points: list[Point] = []
    with closing(Worker(HANG_S)) as worker:
        where = worker(machine, profile)
        print(json.dumps(where), flush=True)
        study = Study(partial(run_point, worker, checkpoint, asked), asked)
        for regime in regimes:
            here = points_of(regime, bench, checkpoint, worker, asked)
            study.measure(here)
            points += here
            made = document(points, where)
            if "out" in given:  # after each regime: a machine that is lent may be taken away
                out = Path(given["out"])
                out.write_text(json.dumps(made, indent=1) + "\n")
                draw(points, made, out.with_suffix(".png"))
    show(made)


if __name__ == "__main__":
    main()
