"""A plan's neighbourhood as points to be measured: one decision moved, one decision forced with the rest solved again, and what peers
would have chosen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import CachePolicy, Decisions, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import vram_use
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.explain.explanation import question_of
from penstock.planner.explain.neighbours import BATCH, candidates
from penstock.planner.solver.planning import answer, plan_of
from penstock.planner.solver.program import solve
from penstock.planner.solver.simple_choice import Choice
from penstock.planner.solver.terms.problem import Question

OURS = "the plan"
IN_VRAM_USE = ("context", "workspace", "norms", "kv", "activations", "guard")
"""Of a plan's VRAM: what any engine takes beside weights."""


@dataclass
class Point:
    """A plan and what came of running it. ``plan`` is None where there is none to run: ``error`` says why."""

    regime: str
    name: str
    plan: Plan | None
    peer: bool = False
    """Whether it is a peer's placement."""
    steps_s: list[float] = field(default_factory=list)
    """Per repeat the median step, in seconds for a token of every request."""
    prefills_s: list[float] = field(default_factory=list)
    finals_s: list[float] = field(default_factory=list)
    """As ``steps_s``, of the repeats after the best point was known."""
    error: str | None = None

    @property
    def waves(self) -> int:
        """Batches that all requests make: where a point has a smaller batch than the plan, a token for each takes more steps."""
        return -(-self.plan.workload.requests // self.plan.decisions.batch)

    @property
    def predicted_s(self) -> float | None:
        """Like ``measured_s``: a token for each request."""
        return self.plan and self.plan.prediction.decode_s_per_token * self.waves

    @property
    def predicted_prefill_s(self) -> float | None:
        """Of a first batch, as each run of a point has one."""
        if self.plan is None:
            return None
        plan = self.plan
        first = replace(plan.workload, requests=plan.decisions.batch)
        return predict(plan.hardware, plan.model, first, plan.decisions).ttft_s * self.waves

    @property
    def measured_s(self) -> float | None:
        return median(self.steps_s) if self.steps_s else None


def moved(plan: Plan) -> Iterator[tuple[str, Force]]:
    """The plan's decisions one by one, each moved a little and a lot. What breaks a rule is left out by :func:`neighbourhood`."""
    w, layers = plan.decisions.weights, plan.model.layers
    cap, hwm, units = w.dram.cap_layers, w.dram.hwm_layers, w.vram.resident_units
    for value in {0, cap // 4, cap // 2, cap * 3 // 4, cap - 2, cap - 1, cap + 1, cap + 2, layers}:
        yield f"cap {value}", Force(cap_layers=value, hwm_layers=value + hwm - cap, prefetch_distance=value + hwm - cap)
    for value in {cap + 3, cap + 5, cap + 10}:
        yield f"HWM {value}", Force(hwm_layers=value, prefetch_distance=min(value, w.dram.prefetch_distance))
    yield f"distance {cap}", Force(prefetch_distance=cap)
    yield "rolling", Force(policy=CachePolicy.rolling)
    for name, kept in (("resident_attn", units.attn), ("resident_ffn", units.ffn)):
        for value in {0, kept // 2, kept - 1, kept + 1}:
            yield f"{name} {value}", Force(**{name: value})
    for value in {4, 6, 8, 12} if w.vram.slots else ():
        yield f"slots {value}", Force(vram_slots=value, vram_prefetch_distance=value - 2)
    for value in {w.ssd.block_bytes // 4, w.ssd.block_bytes * 4}:
        yield f"block {value >> 20} MiB", Force(block_bytes=value)
    for value in {1, w.ssd.queue_depth * 2}:
        yield f"depth {value}", Force(queue_depth=value)
    for value in {w.h2d.chunk_bytes // 8, w.h2d.chunk_bytes * 2} if plan.hardware.gpu else ():
        yield f"chunk {value >> 20} MiB", Force(chunk_bytes=value)
    for value in {1, 4} if plan.hardware.gpu else ():
        yield f"in flight {value}", Force(in_flight=value)
    if plan.decisions.experts is not None:
        slots = plan.decisions.experts
        for name, value in (("expert_vram_slots", slots.vram_slots), ("expert_dram_slots", slots.dram_slots)):
            for part in {value // 2, value * 3 // 4} if value else ():
                yield f"{name} {part}", Force(**{name: part})


def neighbourhood(regime: str, plan: Plan) -> list[Point]:
    """The plan first, then its neighbours that keep every rule, each set of decisions once. Costs a solve for each decision forced."""
    points, seen = [Point(regime, OURS, plan)], {plan.decisions}
    for name, made in [*_moved(plan), *_solved(plan)]:
        if made.decisions in seen or any(broken_rules(made.hardware, made.model, made.workload, made.decisions)):
            continue
        seen.add(made.decisions)
        predicted = predict(made.hardware, made.model, made.workload, made.decisions)
        points.append(Point(regime, name, replace(made, prediction=predicted)))
    return points


def _moved(plan: Plan) -> Iterator[tuple[str, Plan]]:
    for name, force in moved(plan):
        try:
            made: Decisions = force.apply(plan.decisions, plan.model.layers)
        except UserError:
            continue
        yield name, replace(plan, decisions=made)


def _solved(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The fastest plan, which a simple one may have been taken for; then one decision forced, all others solved again around it; the batch,
    too, with the same requests."""
    question = question_of(plan)
    yield "the fastest, solved", plan_of(question, Choice(solve(question.hardware, question.model, question.workload, question.force)))
    asked = [(name, value) for name, _, value in candidates(question, plan.decisions)]
    asked += [("vram_slots", slots) for slots in (6, 8)] if plan.hardware.gpu else []
    asked += [(BATCH, batch) for batch in sorted({1, plan.decisions.batch // 2} - {0, plan.decisions.batch})]
    for name, value in asked:
        if name == BATCH:
            other = replace(question, workload=replace(question.workload, batch=value))
        else:
            other = replace(question, force=question.force.but(**{name: value}))
        try:
            yield f"{name.removeprefix('workload.')}={value}, solved", answer(other)
        except UserError:
            continue


def sampled(points: Sequence[Point], most: int | None, seed: int) -> list[Point]:
    """At most so many of ``points``: the plan and the peers' always, of the others any."""
    if most is None or len(points) <= most:
        return list(points)
    always = [p for p in points if p.peer or p.name == OURS]
    others = [p for p in points if p not in always]
    kept = random.Random(seed).sample(others, max(0, most - len(always)))
    return [p for p in points if p in always or p in kept]


InferMap = Callable[[Mapping[int | str, int]], Mapping[str, int | str]]
"""accelerate's ``infer_auto_device_map`` of the checkpoint: bytes per device -> device per module."""


def peers(regime: str, plan: Plan, infer: InferMap) -> Iterator[Point]:
    """What accelerate and llama.cpp would place where, executed by this engine: the nearest plan that it has."""
    yield _accelerate(regime, plan, infer)
    if plan.hardware.gpu is not None:  # without one llama.cpp has nothing to place
        yield _llama_cpp(regime, plan)


def _accelerate(regime: str, plan: Plan, infer: InferMap) -> Point:
    """``max_memory`` as accelerate itself finds it, the budgets less the context of the card. Layers that it keeps on the card are
    residents here; how the others divide over DRAM and SSD is solved, for a DRAM cache needs a window that its map has not."""
    hardware, name = plan.hardware, "accelerate"
    room: dict[int | str, int] = {"cpu": hardware.dram_bytes}
    if hardware.gpu is not None:
        room = {0: hardware.vram_bytes - hardware.gpu.context_bytes, **room}
    try:
        where = infer(room)
    except UserError as error:
        return Point(regime, name, None, True, error=str(error))
    layers = [_device_of(f"model.layers.{i}", where) for i in range(plan.model.layers)]
    kept = {device: layers.count(device) for device in (0, "cpu", "disk")}
    if hardware.gpu is None:
        return _nearest(regime, f"{name}: {kept['cpu']} layers in DRAM", plan, kept["cpu"], lambda k: Force(cap_layers=k))
    embedding = Tier.vram if _device_of("model.embed_tokens", where) == 0 else Tier.dram
    head = plan.decisions.weights.head_blocks if _device_of("lm_head", where) == 0 else 0
    told = f"{name}: {kept[0]} layers on the card, {kept['cpu']} in DRAM, {kept['disk']} on disk"

    def force(layers: int) -> Force:
        return Force(resident_attn=layers, resident_ffn=layers, resident_head=head, embedding=embedding)

    return _nearest(regime, told, plan, kept[0], force)


def _device_of(module: str, where: Mapping[str, int | str]) -> int | str:
    """That of the nearest module around ``module``; of a module whose parts are divided, that of its last part."""
    parts = [device for name, device in where.items() if name.startswith(module + ".")]
    around = [module.rsplit(".", n)[0] for n in range(module.count(".") + 1)]
    return parts[-1] if parts else next((where[name] for name in (*around, "") if name in where), "cpu")


def _llama_cpp(regime: str, plan: Plan) -> Point:
    """``-ngl``: the output and then as many whole layers, each with its KV, as the budget has room for; the token embedding stays in
    DRAM. The rest, which llama.cpp computes on the CPU, streams here."""
    model, blocks = plan.model, plan.decisions.weights.head_blocks
    use = vram_use(plan.hardware, model, plan.workload, plan.decisions)
    room = plan.hardware.vram_bytes - sum(use[item] for item in IN_VRAM_USE) - model.lm_head_bytes
    layer_bytes = max(a + f for a, f in zip(model.attn_bytes, model.ffn_bytes, strict=True))
    fit = max(0, min(model.layers, room // layer_bytes))

    def force(layers: int) -> Force:
        return Force(resident_attn=layers, resident_ffn=layers, resident_head=blocks if room > 0 else 0, embedding=Tier.dram)

    return _nearest(regime, f"llama.cpp: -ngl {fit + (room > 0)}", plan, fit, force)


def _nearest(regime: str, told: str, plan: Plan, layers: int, force: Callable[[int], Force]) -> Point:
    """The plan solved around ``force`` of ``layers``, or of the most below it that leave the budgets room for what streams here."""
    question, why = question_of(plan), ""
    for fewer in range(layers, -1, -1):
        try:
            found = answer(Question(question.hardware, question.model, question.workload, force(fewer)))
        except UserError as error:
            why = why or str(error).splitlines()[0]
            continue
        return Point(regime, told if fewer == layers else f"{told}; here {fewer}", found, True)
    return Point(regime, told, None, True, error=f"no plan comes near: {why}")
