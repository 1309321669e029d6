"""What compute does in each pass, and how much KV there is: seconds from ``penstock.planner.contract.prices.stages``, cut up by unit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import WeightForm
from penstock.planner.contract.decided.kv_tiers import attended_on_host
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.decided.recording import are_tabled, is_recorded
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import touched_experts
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.cost import verified
from penstock.planner.contract.prices.decoding import unit_s
from penstock.planner.contract.prices.launches import OPERATIONS, are_grouped, copied_issue_s, pieces_issue_s
from penstock.planner.contract.prices.prefill import Prefill
from penstock.planner.contract.prices.reuse import expected
from penstock.planner.contract.prices.stages import lookup_s, prefill_compute_s, prefill_passes, recorded_s, step_compute_s, table_is_far
from penstock.planner.contract.speculation.drafting import counted_tokens
from penstock.planner.simulate.lanes.lanes import NS, ns

PREFILL = "prefill"


@dataclass(frozen=True)
class Pass:
    """One visit of every unit."""

    prefill: bool
    before_ns: int
    """Of compute before the first unit: looking up embeddings, restoring kept KV."""
    unit_ns: tuple[int, ...]
    """Compute of each unit, in order."""
    expert_ns: int
    """Compute of one routed expert, whatever it computes with."""
    row_ns: float
    """And of each token that was routed to it."""
    issued_ns: int
    """Of an MoE layer's compute what issuing takes longer than the device: it goes on while experts are copied."""
    kv_read: float
    """Tokens whose KV a layer outside the device brings in."""
    kv_new: float
    """Tokens whose KV goes out."""
    called_ns: int = 0
    """The host's before each copy of a missed expert, where nothing hides it."""
    served_ns: int = 0
    """Compute of another rank's layer, of whose experts this one has slices, beside the experts'."""
    launch_ns: int = 0
    """Of a rank beside a card: what launching its own layers takes at least, while it waits for those of others."""
    idle_ns: int = 0
    """After it: launching kernels and queueing copies have held each other up for so long."""


@dataclass(frozen=True)
class Passes:
    """``count`` equal passes one after the other."""

    count: int
    each: Pass


def passes_of(plan: Plan, units: tuple[Unit, ...], batch: int) -> list[Passes]:
    """A batch of ``batch`` sequences: the prefill, and a step for every new token but the first. Where drafts are verified, a step computes
    a row for each of them as well, and there are as many fewer as tokens are kept by the acceptance that the plan counts on.

    Steps whose context lies in the same KV page are taken as equal, at their mean context. Seconds are linear in the context, so the sum is
    the same.
    """
    model, work, made = plan.model, plan.workload, plan.decisions
    far, shares = table_is_far(plan.hardware, made) and model.computes_embedding, _Shares(plan, units, batch)
    # a router's choice is read back, so that a rank launches what is behind it when it is known
    waits = model.dealt is not None and plan.hardware.gpu is not None and model.experts is None
    stay = model.decoded(made.weights.forms.decoded)
    least_s = plan.hardware.gpu.layer_kernels_s if waits and plan.hardware.gpu else 0.0
    machines = (plan.hardware, 0.0), (replace(plan.hardware, layer_launch_s=0.0), least_s)
    routed = len(model.experts.layers) if model.experts else 1
    found: list[Passes] = []
    prefill = Prefill(plan.hardware, model, work, made)
    start, restore_s = expected(prefill)
    drafts, each = _drafts(plan), drafted_rows(plan)
    verifies = Prefill(plan.hardware, model, *verified(work, replace(made, speculation=replace(made.speculation, tokens=each - 1))))
    prompt_pass = prefill.bill(start) * (1 / prefill_passes(work, made.prefill_chunk_tokens, start))
    step = verifies.step() if each > 1 else prefill.step()
    idle = {prompts: ns(bill.lasts() - replace(bill, issued=0.0).lasts()) for prompts, bill in ((True, prompt_pass), (False, step))}
    for first in range(start, work.prompt_tokens, made.prefill_chunk_tokens):
        last = min(work.prompt_tokens, first + made.prefill_chunk_tokens)
        prompt = replace(work, prompt_tokens=last)
        seconds, device_s = (prefill_compute_s(h, stay, prompt, batch, made.prefill_chunk_tokens, first, k) for h, k in machines)
        before_s = lookup_s(model, batch * (last - first), 1) if far else 0.0
        before_s += restore_s if first == start else 0.0
        issued_s, launched_s = (0.0, seconds) if waits else (seconds - device_s, 0.0)
        dealt = shares.cut(device_s, issued_s, (last + first) / 2, batch * (last - first))
        over = dealt[3], ns(launched_s), idle[True]
        passed = Pass(True, ns(before_s), *dealt[:3], ns(max(0.0, seconds - device_s) / routed), first, last - first, 0, *over)
        found.append(Passes(1, passed))
    recorded = is_recorded(plan.hardware, plan.placement, made.kv)
    attended = frozenset(() if each > 1 else attended_on_host(model.layers, made.kv))
    rows, stepping, done = batch * each, _Shares(plan, units, batch * each), 0
    page, until, called_s = made.kv.page_tokens, work.end_tokens - 1, copied_issue_s(plan.hardware, model, rows)
    first = work.prompt_tokens
    while first < until:
        last = min(until, (first // page + 1) * page)
        context = (first + last) / 2 / each
        seconds = recorded_s(plan.hardware, stay, context, rows)
        device_s = seconds - pieces_issue_s(plan.hardware, stay, rows) if recorded else 0.0
        if not recorded:
            seconds, device_s = (step_compute_s(h, stay, context, rows, k) for h, k in machines)
        before_s = (lookup_s(model, rows, 1) if far else 0.0) + drafts.before_s
        spared_s = len(attended) * batch * context * model.kv_bytes_per_token / model.layers / plan.hardware.weight_gbps / GB
        issued_s, launched_s = (0.0, seconds) if waits and not recorded else (seconds - device_s, 0.0)
        dealt = stepping.cut(max(0.0, device_s - spared_s), issued_s, context, rows, attended, recorded)
        kv_read, count = (first + last) / 2 - 0.5, round((last - work.prompt_tokens) / drafts.kept) - done
        over = dealt[3], ns(launched_s), idle[False]
        hidden_s = 0.0 if called_s and recorded else max(0.0, seconds - device_s) / routed
        passed = Pass(False, ns(before_s), *dealt[:3], ns(hidden_s), kv_read, each, ns(called_s) * recorded, *over)
        found += [Passes(count, passed)] if count else []
        first, done = last, done + count
    return found


@dataclass(frozen=True)
class _Drafts:
    """``before_s``: seconds in which a model drafts before a step. ``kept``: tokens that a step gives a sequence."""

    before_s: float
    kept: float


def _drafts(plan: Plan) -> _Drafts:
    decided, drafter = plan.decisions.speculation, plan.drafter
    before_s = 0.0 if drafter is None else decided.tokens * drafter.prediction.decode_s_per_token
    return _Drafts(before_s, counted_tokens(decided, decided.tokens))


def drafted_rows(plan: Plan) -> int:
    """Tokens that a decode step computes for each sequence: its last one and its drafts, on average where some steps have no proposal."""
    decided = plan.decisions.speculation
    return 1 + round(decided.proposes * decided.tokens)


class _Shares:
    """Compute seconds of a pass, divided among its units. Launches are divided by operations. The rest is divided by bytes read or by
    FLOPs, whichever takes longer for the whole pass; attention's FLOPs are counted apart. The sum is that of
    ``penstock.planner.contract.prices.stages``."""

    def __init__(self, plan: Plan, units: tuple[Unit, ...], batch: int):
        self._plan, self._units, self._batch = plan, units, batch
        self._placement = plan.placement
        self._head_rows = batch

    def cut(
        self,
        device_s: float,
        issued_s: float,
        context: float,
        tokens: int,
        attended: frozenset[int] = frozenset(),
        recorded: bool = False,
    ) -> tuple[tuple[int, ...], int, float, int]:
        """Nanoseconds of each unit, of one routed expert, of a token routed to it, and of serving another rank's layer. The pass has
        ``tokens`` tokens over all sequences. Each of them attends to ``context`` others on average, in layers ``attended`` elsewhere. What
        is ``recorded`` is launched with the next layer's experts."""
        experts = self._plan.model.experts
        routed, touched = (len(experts.layers), touched_experts(experts, tokens)) if experts else (0, 1.0)
        work, work_each, work_row = self._work(context, tokens, routed, touched, attended)
        issue, issue_each = [self._operations(unit, tokens, recorded) for unit in self._units], 0
        if experts and recorded:
            issue_each = OPERATIONS.piece_each(tokens, are_tabled(self._plan.model, tokens))
        elif experts:
            issue_each = OPERATIONS.each(tokens, self._plan.hardware.gpu is not None, self._grouped(tokens))
        rows = tokens * experts.top_k if experts else 0
        by_work = device_s / (sum(work) + routed * (touched * work_each + rows * work_row))
        serving = OPERATIONS.serving(tokens, self._grouped(tokens)) if routed > len(self._plan.model.moe) else 0
        issues = sum(issue) + routed * touched * issue_each + (routed - len(self._plan.model.moe)) * serving
        by_issue = issued_s / issues if issues else 0.0
        units = tuple(ns(by_work * w + by_issue * i) for w, i in zip(work, issue, strict=True))
        return units, ns(by_work * work_each + by_issue * issue_each), by_work * work_row * NS, ns(by_issue * serving)

    def _work(self, context: float, tokens: int, routed: int, touched: float, attended: frozenset[int]) -> tuple[list[float], float, float]:
        """Of each unit, of one of the ``touched`` experts of each of ``routed`` layers, and of a token in it: bytes or FLOPs."""
        model, hardware, experts = self._plan.model, self._plan.hardware, self._plan.model.experts
        read_kv = self._batch * context * model.kv_bytes_per_token / model.layers
        here = {unit for unit in self._units if unit.kind == "attn" and unit.layer not in attended}
        read = [self._read(unit, tokens) + (read_kv if unit in here else 0) for unit in self._units]
        score_s = tokens * model.attention_flops(context) / model.layers / hardware.attention_tflops
        flops = [
            2 * self._elements(unit) * (self._head_rows if unit.kind == "head" else tokens) / hardware.dense_tflops
            + (score_s if unit in here else 0)
            for unit in self._units
        ]
        expert_bytes, rows = 0.0, 0
        if experts:
            rows = tokens * experts.top_k
            expert_bytes = _as_bytes(hardware, unit_s(hardware, model.of_kind(UnitKind.expert)[0], max(1.0, rows / touched)))
        row_flops = 2 * model.of_kind(UnitKind.expert)[0].elements / hardware.dense_tflops if experts else 0.0
        by_read, by_flops = sum(read) + routed * touched * expert_bytes, sum(flops) + routed * rows * row_flops
        if by_read / hardware.weight_gbps > by_flops / 1e3:
            return read, expert_bytes, 0.0
        return flops, 0.0, row_flops

    def _operations(self, unit: Unit, tokens: int, recorded: bool) -> float:
        if unit.kind == "head":
            return 0.0
        if recorded:
            routed = unit.kind == "ffn" and unit.layer in self._plan.model.moe
            return OPERATIONS.piece_routing(tokens, are_tabled(self._plan.model, tokens)) if routed else 0.0
        marks = OPERATIONS.marks / 2 if self._plan.hardware.gpu else 0.0
        if unit.kind == "attn":
            return OPERATIONS.attention + marks
        if unit.layer not in self._plan.model.moe:
            return OPERATIONS.mlp + marks
        return OPERATIONS.routing(tokens, self._grouped(tokens)) + OPERATIONS.shared(self._plan.model.slices) + marks

    def _grouped(self, tokens: int) -> bool:
        return are_grouped(self._plan.hardware, self._plan.model, tokens)

    def _read(self, unit: Unit, tokens: int) -> float:
        """Bytes that take as long to read as a product of ``tokens`` rows with ``unit``, as it is kept, waits for its weights."""
        spec, hardware = self._placement.spec(unit), self._plan.hardware
        kept = spec.decoded if self._placement.form(unit) is WeightForm.decoded else spec
        return _as_bytes(hardware, unit_s(hardware, kept, tokens)) / self._parts(unit)

    def _elements(self, unit: Unit) -> int:
        return self._placement.spec(unit).elements // self._parts(unit)

    def _parts(self, unit: Unit) -> int:
        return self._plan.decisions.weights.head_blocks if unit.kind == "head" else 1


def _as_bytes(hardware: HardwareProfile, seconds: float) -> float:
    return seconds * hardware.weight_gbps * GB


def host_units(plan: Plan) -> dict[Unit, int]:
    """Nanoseconds of each unit that the CPU computes in a decode step, its way there and back with it."""
    decisions, placement, rows = plan.decisions, plan.placement, plan.decisions.batch * drafted_rows(plan)
    if not decisions.weights.host.compute(rows):
        return {}
    beside = Beside.of(plan.hardware, plan.model, rows, decisions.weights.forms)
    return {unit: ns(beside.handed_s(placement.spec(unit))) for unit in placement.host_units}
