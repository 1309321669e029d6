"""A plan with routed experts, run once in a worker's process: what its decode steps took, moved and computed, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from bench.worker import WARM_UP, Trial, opened


@dataclass(frozen=True)
class RoutedRun:
    """Of one run's decode steps."""

    step_s: float
    """Mean: steps differ by what they miss."""
    resident_s: float
    """A step of the same process that finds every expert, median."""
    copied_gb: float
    """Of a step, over the link."""
    computed_gb: float
    """Of a step, by the CPU where it lies."""
    missed: float
    """The share of experts that VRAM did not have; without a card, that DRAM did not have."""
    host_us: float
    """Processor time of a layer's visit."""


def measure_routed(trial: Trial) -> RoutedRun:
    """Run ``trial`` by the engine and the loop of `runtime run`, tokens drawn. UserError as :func:`bench.worker.opened`."""
    with opened(trial) as (session, batch, device):
        from penstock.runtime.engine.link_limits import measure_compute
        from penstock.runtime.engine.passes.sampling import Sampler, Sampling

        engine = session.engine
        first: dict[str, int] = {}

        def progress(phase: str, done: int, total: int) -> None:
            if phase == "decode" and not first:
                first.update(_bytes(engine.stage_totals()))

        made = session.generate(batch, Sampler(Sampling(temperature=1.0, seed=trial.seed), device), progress=progress)
        last, experts = _bytes(engine.stage_totals()), engine.facts()["experts"]
        engine.stop()
        resident_s = measure_compute(engine, batch)["decode_s"]
    gb = {stage: (nbytes - first.get(stage, 0)) / len(made.step_s) / 1e9 for stage, nbytes in last.items()}
    missed = experts["missed"]["vram" if experts["vram"] else "dram"]
    host_us = (experts["host_s_per_visit"] or 0.0) * 1e6
    return RoutedRun(fmean(made.step_s[WARM_UP:]), resident_s, gb.get("h2d", 0.0), gb.get("cpu", 0.0), missed or 0.0, host_us)


def _bytes(totals: Mapping[str, tuple[int, float]]) -> dict[str, int]:
    return {stage: nbytes for stage, (nbytes, _) in totals.items()}
