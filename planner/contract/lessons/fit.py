"""From what a run measured of its stages to how much slower each of the machine's figures is than its profile says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations

from penstock.planner.contract.bills.cost import load_s, pinned_gb, predict
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.placement import place
from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.lessons.corrections import slowed
from penstock.planner.contract.prices.launches import begun_issue_s, is_recorded
from penstock.planner.contract.prices.stages import (
    FIXED,
    Stage,
    decode_compute_s,
    lookup_s,
    prefill_compute_s,
    prefill_passes,
    recorded_s,
    ssd_gbps,
    table_is_far,
)

LINKS = {Figure.ssd: Stage.ssd, Figure.h2d: Stage.h2d, Figure.d2h: Stage.d2h}
MOST = 64.0
"""A figure that is off by more is taken to be off by this much: a stage that waited for another reason."""
_TIMES = 3
"""The whole fit again where with it other tokens are restored than before."""
_ROUNDS, _HALVINGS, _SAME = 12, 40, 1e-6
"""Of solving for one figure after the other, and of the interval in which each lies; and the logarithm of a change that ends it."""
_NEARNESS = 1e-4
"""Of two corrections that explain a run as well the smaller one is taken: weight of its square beside that of the error."""

_NUDGE, _SHOWS = 1.1, 0.01
"""A run teaches a figure if a tenth more or less of its seconds changes a phase's compute by one in a hundred."""


@dataclass(frozen=True)
class Measured:
    """Of one run: seconds in which each stage had work in flight, for the bytes that the plan moves, and seconds of the phases. What was
    not measured is left out, or None."""

    prefill: Mapping[Stage, float] = field(default_factory=dict)
    decode: Mapping[Stage, float] = field(default_factory=dict)
    """Of one step."""
    prefill_s: float | None = None
    decode_s: float | None = None
    load_s: float | None = None
    cached: float = 0.0
    """Share of the weights that the page cache held."""
    ssd_gbps: float | None = None
    """While weights were loaded, with the plan's block and depth."""
    h2d_gbps: float | None = None
    """Likewise, with the largest copies that the profile knows."""
    dram_copy_gbps: float | None = None
    pin_s_per_gb: float | None = None


@dataclass(frozen=True)
class Fitted:
    """``slow`` has only what the run could tell: the factor of each figure's seconds over the profile's."""

    slow: dict[Figure, float]
    pass_s: float | None
    start_s: float | None


def fit(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions, seen: Measured) -> Fitted:
    """The corrections with which the cost model gives what ``seen`` says. Some 2,000 evaluations of it, less than a second.

    A link's busy seconds are taken from decode, and from the prefill where decode moved nothing: the prefill's are those of a few passes.
    Where both moved nothing, a rate is that of loading. Page-locking is no slower than the start was long: imports, beside which it begins,
    may have taken longer than is assumed.
    """
    base = replace(hardware, pass_s=0.0, start_s=0.0)
    slow: dict[Figure, float] = {}
    if seen.ssd_gbps:
        ssd = decisions.weights.ssd
        slow[Figure.ssd] = _bounded(ssd_gbps(base, ssd.block_bytes, ssd.queue_depth) / seen.ssd_gbps)
    if seen.h2d_gbps and base.gpu:
        slow[Figure.h2d] = _bounded(base.gpu.h2d.points[-1][1] / seen.h2d_gbps)
    if seen.dram_copy_gbps and base.dram_copy_gbps:
        slow[Figure.dram_copy] = base.dram_copy_gbps / seen.dram_copy_gbps
    if seen.pin_s_per_gb and base.pin_s_per_gb:
        gb, whole_s = pinned_gb(base, model, workload, decisions), math.inf if seen.load_s is None else seen.load_s + FIXED.imports_s
        slow[Figure.page_lock] = min(seen.pin_s_per_gb, whole_s / gb) / base.pin_s_per_gb
    start = None
    for _ in range(_TIMES):
        restored = predict(slowed(base, slow), model, workload, decisions).restored_tokens
        if restored == start:
            break
        start = restored
        slow |= _compute(base, model, workload, decisions, seen, start)
        slow |= _links(base, model, workload, decisions, seen, slow)
    fitted = slowed(base, slow)
    predicted = predict(fitted, model, workload, decisions)
    pass_s = start_s = None
    if seen.decode_s is not None:
        pass_s = max(0.0, seen.decode_s - predicted.decode_s_per_token)
    elif seen.prefill_s is not None:
        passes = prefill_passes(workload, decisions.prefill_chunk_tokens, predicted.restored_tokens)
        pass_s = max(0.0, seen.prefill_s - predicted.prefill_s) / passes
    if seen.load_s is not None:
        start_s = max(0.0, seen.load_s - load_s(fitted, model, workload, decisions, seen.cached))
    return Fitted(slow, pass_s, start_s)


def _links(
    base: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions, seen: Measured, known: Mapping[Figure, float]
) -> dict[Figure, float]:
    """Of those that moved something; what they lose to each other is in the cost model."""

    def stages(machine: HardwareProfile) -> tuple[dict[str, float], dict[str, float]]:
        predicted = predict(machine, model, workload, decisions)
        return predicted.decode_stages, predicted.prefill_stages

    def error_of(phase: int, stage: Stage, seconds: float) -> Callable[[HardwareProfile], float]:
        return lambda machine: math.log(stages(machine)[phase][stage] / seconds)

    errors: dict[Figure, Callable[[HardwareProfile], float]] = {}
    said = stages(slowed(base, known))
    for figure, stage in LINKS.items():
        phase = next((i for i, got in enumerate((seen.decode, seen.prefill)) if got.get(stage) and said[i][stage]), None)
        if phase is not None:
            errors[figure] = error_of(phase, stage, (seen.decode, seen.prefill)[phase][stage])
    start = {figure: math.log(known.get(figure, 1.0)) for figure in errors}
    others = {figure: factor for figure, factor in known.items() if figure not in errors}
    return _factors(_solved(slowed(base, others), errors, start))


def _compute(
    base: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions, seen: Measured, start: int
) -> dict[Figure, float]:
    """The two figures of compute, each of which takes part in both phases."""
    batch, chunk = decisions.batch, decisions.prefill_chunk_tokens
    rows, passes = batch * (workload.prompt_tokens - start), prefill_passes(workload, chunk, start)
    far = table_is_far(base, decisions)
    recorded = is_recorded(base, place(model, decisions.weights, base.gpu is not None), decisions.kv)
    each = decisions.speculation.tokens + 1
    context = (workload.prompt_tokens + workload.new_tokens / 2) / each
    verified = replace(workload, prompt_tokens=max(1, workload.prompt_tokens // each))

    def stepping_s(machine: HardwareProfile) -> float:
        if recorded:
            return recorded_s(machine, model, context, batch * each)
        return decode_compute_s(machine, model, verified, batch * each)

    def prompts_s(machine: HardwareProfile) -> float:
        return prefill_compute_s(machine, model, workload, batch, chunk, start) + passes * begun_issue_s(machine)

    errors: list[Callable[[HardwareProfile], float]] = []
    if prefill_s := seen.prefill.get(Stage.compute):
        products_s = _beyond(prefill_s, lookup_s(base, model, rows, passes) if far else 0.0)
        errors.append(lambda h: math.log(prompts_s(h) / products_s))
    if decode_s := seen.decode.get(Stage.compute):
        step_s = _beyond(decode_s, lookup_s(base, model, batch * each, 1) if far else 0.0)
        errors.append(lambda h: math.log(stepping_s(h) / step_s))

    def misfit(logs: Mapping[Figure, float]) -> float:
        machine = slowed(base, _factors(logs))
        return sum(error(machine) ** 2 for error in errors) + _NEARNESS * sum(x**2 for x in logs.values())

    ways = [dict(zip(figures, errors, strict=False)) for figures in permutations((Figure.products, Figure.weights))]
    begin = dict.fromkeys((Figure.weights, Figure.products), 0.0)
    found = _factors(min((_solved(base, way, begin) for way in ways), key=misfit))

    def shows(figure: Figure, factor: float) -> bool:
        others = (slowed(base, {**found, figure: factor * by}) for by in (_NUDGE, 1 / _NUDGE))
        at = [error(slowed(base, {**found, figure: factor})) for error in errors]
        return any(abs(error(other) - here) > _SHOWS for other in others for error, here in zip(errors, at, strict=True))

    def told(figure: Figure) -> bool:
        """Whether another factor of ``figure`` would have shown in this run, also at the profile's value. A figure that hardly counts would
        learn what another one took. For instance, a prompt of a few tokens computes for as long as its launches take."""
        return shows(figure, found[figure]) and shows(figure, 1.0)

    return {figure: found[figure] for figure in found if told(figure)}


def _solved(
    base: HardwareProfile, errors: Mapping[Figure, Callable[[HardwareProfile], float]], start: Mapping[Figure, float]
) -> dict[Figure, float]:
    """Logarithms of the factors with which each error is 0, as nearly as it can be: one figure after the other, again and again."""
    logs = dict(start)
    for _ in range(_ROUNDS):
        before = dict(logs)
        for figure, error in errors.items():
            logs[figure] = _nearest_root(lambda x: error(slowed(base, _factors({**logs, figure: x}))), logs[figure])  # noqa: B023
        if all(abs(logs[figure] - before[figure]) < _SAME for figure in logs):
            break
    return logs


def _nearest_root(rising: Callable[[float], float], near: float) -> float:
    """Of all x up to ``MOST`` at which ``rising`` is as near to 0 as it gets, the one nearest to ``near``."""
    ends = -math.log(MOST), math.log(MOST)
    target = min(max(0.0, rising(ends[0])), rising(ends[1]))
    here = rising(near) - target
    if abs(here) < 1e-9:
        return near
    inside, outside = near, ends[0] if here > 0 else ends[1]
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        if (rising(middle) - target) * here > 1e-9 * abs(here):
            inside = middle
        else:
            outside = middle
    return outside


def _factors(logs: Mapping[Figure, float]) -> dict[Figure, float]:
    return {figure: math.exp(x) for figure, x in logs.items()}


def _beyond(seconds: float, fixed_s: float) -> float:
    """``seconds`` less what is fixed, though not less than a tenth."""
    return max(seconds - fixed_s, seconds / 10)


def _bounded(factor: float) -> float:
    return min(MOST, max(1 / MOST, factor))
