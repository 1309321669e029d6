"""What a run measured of its machine, kept for `planner solve`. Costs the run nothing but the fit after its end."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from penstock.planner.common.drive import drive_of
from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.speculating import Speculation
from penstock.planner.contract.lessons.calibration import (
    Calibration,
    Machine,
    calibration_path,
    read_calibration,
    run_of,
    write_calibration,
)
from penstock.planner.contract.lessons.draft_lesson import DraftLesson, draft_step_s
from penstock.planner.contract.lessons.fit import Measured, fit
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.stages import Stage

if TYPE_CHECKING:
    import torch

    from penstock.runtime.engine.run_job import Served
    from penstock.runtime.told.run_report import Outcome
    from penstock.runtime.told.stage_clock import StageUse

LEAST_BYTES = 64_000_000
"""Bytes of a phase below which a transfer teaches its latency, not its rate."""


def check_card(plan: Plan, device: torch.device) -> None:
    """UserError where the card is not the one of the plan's profile: what it does would be learnt of another."""
    if device.type != "cuda" or plan.hardware.gpu is None:
        return
    import torch

    card = torch.cuda.get_device_name(device)
    if card != plan.hardware.gpu.name:
        raise UserError(
            f"calibrate=true: the plan's GPU is {plan.hardware.gpu.name}, this one {card}; run `planner probe`, then solve with "
            "hardware=local"
        )


def calibrate(outcome: Outcome) -> dict[str, Any]:
    """Add the run to this machine's calibration; what it taught, for the report. UserError where that cannot be written."""
    plan = outcome.job.plan
    path, machine = calibration_path(plan.hardware), Machine.of(plan.hardware)
    drafts = outcome.engine["speculation"]
    fitted = fit(plan.hardware, plan.model, plan.workload, _as_drafted(plan, drafts), measured(outcome))
    when = datetime.datetime.now().isoformat(" ", "minutes")
    read_gb = sum(stages[Stage.ssd].bytes for stages in outcome.clock.phases.values() if Stage.ssd in stages) / GB
    run = run_of(plan.hardware, plan.model, fitted, when, drive_of(outcome.job.checkpoint), read_gb)
    run = replace(run, drafts=DraftLesson.of(plan.decisions.speculation, plan.workload.name, drafts))
    write_calibration(path, (read_calibration(path) or Calibration(machine)).with_run(run))
    rates = {str(figure): 1 / factor for figure, factor in fitted.slow.items()}
    return {"file": str(path), "of_profile": rates, **asdict(run)}


def _as_drafted(plan: Plan, drafts: Mapping[str, Any] | None) -> Decisions:
    """The plan's decisions with as many drafts as its passes had on average, and with the seconds that a model took for one of them: what
    it took is nothing that the fit should explain by the planned model's own figures."""
    decided = plan.decisions.speculation
    if not drafts or not drafts["rows"]:
        return replace(plan.decisions, speculation=Speculation())
    each = round(drafts["drafted"] / drafts["rows"])
    timed_s = draft_step_s(decided, drafts) or decided.step_s
    return replace(plan.decisions, speculation=replace(decided, tokens=each, proposes=1.0, step_s=timed_s))


def calibrated_line(told: Mapping[str, Any]) -> str:
    """One line of what ``calibrate`` returned."""
    rates = ", ".join(f"{figure} {rate:.2f}" for figure, rate in told["of_profile"].items())
    return f"calibrated: {rates or 'no rate'} of the plan's profile, kept in {told['file']}; `planner solve` plans by it"


def measured(outcome: Outcome) -> Measured:
    """The run's stages as the fit takes them. A phase is left out if its batches differ from those predicted. Of several prompts the first
    is left out: a process's first prompt takes longer, and that is no rate of the machine."""
    plan, generations, phases = outcome.job.plan, outcome.generations, outcome.clock.phases
    typical = fmean if plan.model.experts or outcome.engine["speculation"] else median
    steps = [s for made in generations for s in made.step_s]
    prefills, prompts = phases["prefill"], [made.prefill_s for made in generations]
    if len(prompts) > 1:
        first = outcome.clock.first["prefill"]
        prefills, prompts = {stage: use.plus(first[stage], -1) for stage, use in prefills.items()}, prompts[1:]
    whole = all(len(served.batch.prompts) == plan.decisions.batch for served in _served(outcome))
    prefill: dict[Stage, float] = {}
    decode: dict[Stage, float] = {}
    step_s: float | None = None
    if whole and _alike(outcome):
        prefill = _seconds(outcome, prefills, prompts, typical)
    if whole and steps:
        p, moved = plan.prediction, phases["decode"]
        said = {Stage.ssd: p.ssd_bytes_per_token, Stage.h2d: p.h2d_bytes_per_token}
        busy = _seconds(outcome, moved, steps, typical)
        shares = {stage: said[stage] * len(steps) / moved[stage].bytes for stage in busy if stage in said}
        decode, step_s = with_planned_bytes(busy, typical(steps) - _reading_s(outcome), shares)
    beside = _beside(outcome)
    taken, cached = beside.get("fault_in", (0.0, 0)), beside.get("page_cache", (0.0, 0))
    read = beside.get("ssd", (0.0, 0))
    return Measured(
        prefill=prefill,
        decode=decode,
        prefill_s=typical(prompts) if prefill else None,
        decode_s=step_s if decode else None,
        load_s=outcome.load_s,
        cached=cached[1] / (cached[1] + read[1]) if cached[1] else 0.0,
        ssd_gbps=_gbps(read),
        dram_copy_gbps=_gbps(cached),
        pin_s_per_gb=(taken[0] + beside.get("page_lock", (0.0, 0))[0]) / taken[1] * GB if taken[1] >= LEAST_BYTES else None,
    )


def _reading_s(outcome: Outcome) -> float:
    """Of a step on average, in which a model that drafts read prompts: a prediction counts that as prefill."""
    drafts = outcome.engine["speculation"]
    return float(drafts["read_s"] / drafts["passes"]) if drafts and drafts["passes"] else 0.0


def with_planned_bytes(busy: Mapping[Stage, float], step_s: float, shares: Mapping[Stage, float]) -> tuple[dict[Stage, float], float]:
    """Busy seconds of a step's stages, and the step's own, had links moved ``shares`` of what they moved. Few steps, or those behind a
    prompt, miss more experts than the mean step. The excess is not unexplained time: the step is shortened by what the busiest link took
    for it."""
    planned = {stage: seconds * shares.get(stage, 1.0) for stage, seconds in busy.items()}
    links = [stage for stage in busy if stage in shares]
    slowest = max(links, key=busy.__getitem__, default=None)
    return planned, step_s if slowest is None else step_s - busy[slowest] + planned[slowest]


def _seconds(
    outcome: Outcome, uses: Mapping[str, StageUse], lengths_s: Sequence[float], typical: Callable[[Sequence[float]], float]
) -> dict[Stage, float]:
    """Busy seconds of each stage that teaches its rate, in a prefill or step of ``typical`` length. That is the median: a few long ones,
    such as a stalled drive's, are no rate. With experts it is the mean, because steps differ by their misses, and with drafts by their
    rows."""
    links = {Stage.ssd, Stage.h2d, Stage.d2h} - ({Stage.h2d, Stage.d2h} if outcome.engine["arena"]["refused"] else set())
    busy = {stage: uses[stage] for stage in Stage if stage in uses and uses[stage].busy_s}
    told = (stage for stage, use in busy.items() if stage is Stage.compute or (stage in links and use.bytes >= LEAST_BYTES))
    return {stage: busy[stage].busy_s / sum(lengths_s) * typical(lengths_s) for stage in told}


def _alike(outcome: Outcome) -> bool:
    """Whether every prompt was as long as the prediction's and computed as a whole."""
    tokens, reuse = outcome.job.plan.workload.prompt_tokens, outcome.engine["kv_reuse"]
    restored = sum(reuse["restored_tokens"].values()) if reuse else 0
    return not restored and all(max(map(len, served.batch.prompts)) == tokens for served in _served(outcome))


def _served(outcome: Outcome) -> list[Served]:
    return [served for batches in outcome.rounds for served in batches]


def _beside(outcome: Outcome) -> dict[str, tuple[float, int]]:
    """What other threads did during the start: seconds and bytes."""
    seconds, nbytes = outcome.engine["start_beside_s"], outcome.engine["start_beside_bytes"]
    return {name: (seconds[name], nbytes[name]) for name in nbytes}


def _gbps(moved: tuple[float, int]) -> float | None:
    seconds, nbytes = moved
    return nbytes / seconds / GB if seconds and nbytes >= LEAST_BYTES else None
