"""What compute does in each pass, and how much KV there is: seconds from ``penstock.planner.contract.prices.stages``, cut up by unit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.planner.common.measures import GB
from penstock.planner.contract.bills.cost import verified
from penstock.planner.contract.bills.prefill import Prefill
from penstock.planner.contract.bills.reuse import expected
from penstock.planner.contract.decided.kv_tiers import attended_on_host
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.decided.recording import can_record, launched_hands_over, reads_layers
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.decoding import unit_s
from penstock.planner.contract.prices.launches import (
    begun_issue_s,
    copied_issue_s,
    is_recorded,
    pieces_issue_s,
    recorded_operations,
    step_issue_s,
)
from penstock.planner.contract.prices.stages import (
    layers_beside_s,
    lookup_s,
    prefill_compute_s,
    prefill_passes,
    recorded_s,
    step_compute_s,
    table_is_far,
)
from penstock.planner.contract.speculation.drafting import counted_tokens
from penstock.planner.simulate.lanes.host_lane import OnHost
from penstock.planner.simulate.lanes.lanes import ns
from penstock.planner.simulate.unit_shares import UnitShares

PREFILL = "prefill"


@dataclass(frozen=True)
class Pass:
    """One visit of every unit."""

    prefill: bool
    before_ns: int
    """Of compute before the first unit: looking up embeddings, restoring kept KV."""
    unit_ns: tuple[int, ...]
    """Compute of each unit, in order."""
    unit_issued_ns: tuple[int, ...]
    """Of that, what issuing takes longer than the device: it goes on while experts are copied."""
    expert_ns: int
    """Compute of one routed expert, whatever it computes with."""
    expert_issued_ns: int
    """Of that, what issuing takes longer than the device."""
    row_ns: float
    """Compute of each token that was routed to it, besides."""
    served_ns: int
    """Compute of another rank's layer, of whose experts this one has slices, beside the experts'."""
    kv_read: float
    """Tokens whose KV a layer outside the device brings in."""
    kv_new: float
    """Tokens whose KV goes out."""
    called_ns: int = 0
    """The host's before each copy of a missed expert, where nothing hides it."""
    launch_ns: int = 0
    """Of a rank beside a card: what launching its own layers takes at least, while it waits for those of others."""
    least_ns: int = 0
    """Of the whole pass: launching kernels and queueing copies hold each other up for so long."""


@dataclass(frozen=True)
class Passes:
    """``count`` equal passes one after the other."""

    count: int
    each: Pass


def passes_of(plan: Plan, units: tuple[Unit, ...], batch: int, more: float = 0) -> list[Passes]:
    """A batch of ``batch`` sequences: the prefill, and a step for every new token but the first. Where drafts are verified, a step computes
    a row for each of them as well, and there are as many fewer as tokens are kept by the acceptance that the plan counts on. ``more``:
    operations of a prompt's layer beside a whole pass's.

    Steps whose context lies in the same KV page are taken as equal, at their mean context. Seconds are linear in the context, so the sum is
    the same.
    """
    model, work, made = plan.model, plan.workload, plan.decisions
    far, shares = table_is_far(plan.hardware, made) and model.computes_embedding, UnitShares(plan, units, batch)
    # a router's choice is read back, so that a rank launches what is behind it when it is known
    waits = model.dealt is not None and plan.hardware.gpu is not None and model.experts is None
    stay = model.decoded(made.weights.forms.decoded).in_turn
    more += recorded_operations(plan.hardware, stay, batch * made.prefill_chunk_tokens, made.recorded_prompt_tokens)
    least_s = plan.hardware.gpu.layer_kernels_s if waits and plan.hardware.gpu else 0.0
    machines = (plan.hardware, 0.0), (replace(plan.hardware, layer_launch_s=0.0), least_s)
    found: list[Passes] = []
    prefill = Prefill(plan.hardware, model, work, made)
    start, restore_s = expected(prefill)
    drafts, each = _drafts(plan), drafted_rows(plan)
    verifies = Prefill(plan.hardware, model, *verified(work, replace(made, speculation=replace(made.speculation, tokens=each - 1))))
    prompt_pass = prefill.bill(start) * (1 / prefill_passes(work, made.prefill_chunk_tokens, start))
    step = verifies.step() if each > 1 else prefill.step()
    least = {prompts: ns(bill.issuing_s) for prompts, bill in ((True, prompt_pass), (False, step))}
    done_s = 0.0
    for first in range(start, work.prompt_tokens, made.prefill_chunk_tokens):
        last = min(work.prompt_tokens, first + made.prefill_chunk_tokens)
        prompt = replace(work, prompt_tokens=last)
        as_stored_s = _as_stored_s(plan, batch * (last - first))
        seconds, device_s = (
            prefill_compute_s(h, stay, prompt, batch, made.prefill_chunk_tokens, first, k, more, done_s) + as_stored_s for h, k in machines
        )
        done_s += device_s
        before_s = lookup_s(plan.hardware, model, batch * (last - first), 1) if far else 0.0
        before_s += begun_issue_s(plan.hardware) + (restore_s if first == start else 0.0)
        issued_s, launched_s = (0.0, seconds) if waits else (seconds - device_s, 0.0)
        cut = shares.cut(device_s, issued_s, (last + first) / 2, batch * (last - first), prompt=True)
        found.append(Passes(1, Pass(True, ns(before_s), *cut, first, last - first, 0, ns(launched_s), least[True])))
    recorded = is_recorded(plan.hardware, plan.placement, made.kv)
    may_record = can_record(plan.hardware, model) and model.dealt is None and model.experts is None
    attended = frozenset(() if each > 1 else attended_on_host(model.layers, made.kv))
    rows, stepping, done = batch * each, UnitShares(plan, units, batch * each), 0
    as_stored_s = _as_stored_s(plan, rows)
    page, until, called_s = made.kv.page_tokens, work.end_tokens - 1, copied_issue_s(plan.hardware, model, rows)
    first = work.prompt_tokens
    while first < until:
        last = min(until, (first // page + 1) * page)
        context = (first + last) / 2 / each
        seconds = recorded_s(plan.hardware, stay, context, rows) + as_stored_s
        beside_s, step_s = (layers_beside_s(plan.hardware, stay, rows), step_issue_s(plan.hardware, stay)) if recorded else (0.0, 0.0)
        seconds, device_s = seconds - step_s, seconds - step_s - pieces_issue_s(plan.hardware, stay, rows)
        if not recorded:
            least_s = seconds if may_record else 0.0  # that launched kernels take no less than recorded ones is the law's
            seconds, device_s = (max(least_s, step_compute_s(h, stay, context, rows, k) + as_stored_s) for h, k in machines)
        before_s = (lookup_s(plan.hardware, model, rows, 1) if far else 0.0) + drafts.before_s + step_s
        spared_s = len(attended) * batch * context * model.kv_bytes_per_token / model.layers / plan.hardware.weight_gbps / GB
        issued_s, launched_s = (0.0, seconds) if waits and not recorded else (seconds - device_s, 0.0)
        cut = stepping.cut(max(0.0, device_s - beside_s - spared_s), issued_s, context, rows, attended, recorded, beside_s=beside_s)
        kv_read, count = (first + last) / 2 - 0.5, round((last - work.prompt_tokens) / drafts.kept) - done
        if called_s and recorded:
            cut = cut.not_hidden
        passed = Pass(False, ns(before_s), *cut, kv_read, each, ns(called_s) * recorded, ns(launched_s), least[False])
        found += [Passes(count, passed)] if count else []
        first, done = last, done + count
    return found


def _as_stored_s(plan: Plan, rows: int) -> float:
    """Seconds of a pass of ``rows`` rows over units that stream, and so come as they are stored, where those of their kind that stay are
    decoded: beyond those of decoded ones. Less than 0 where fewer bytes are read."""
    kinds, placement = plan.decisions.weights.forms.decoded, plan.placement
    stored = [placement.spec(unit) for unit in placement.streamed_units if unit.kind in kinds]
    return sum(unit_s(plan.hardware, unit, rows) - unit_s(plan.hardware, unit.decoded, rows) for unit in stored)


@dataclass(frozen=True)
class _Drafts:
    """``before_s``: seconds in which a model drafts before a step. ``kept``: tokens that a step gives a sequence."""

    before_s: float
    kept: float


def _drafts(plan: Plan) -> _Drafts:
    decided, drafter = plan.decisions.speculation, plan.drafter
    before_s = 0.0 if drafter is None else decided.tokens * (decided.step_s or drafter.prediction.decode_s_per_token)
    return _Drafts(before_s, counted_tokens(decided, decided.tokens))


def drafted_rows(plan: Plan) -> int:
    """Tokens that a decode step computes for each sequence: its last one and its drafts, on average where some steps have no proposal."""
    decided = plan.decisions.speculation
    return 1 + round(decided.proposes * decided.tokens)


def host_units(plan: Plan) -> dict[Unit, OnHost]:
    """The units that the CPU computes in a decode step, in their order. None in a step that verifies drafts and is launched kernel by
    kernel where others are recorded."""
    decisions, placement, rows = plan.decisions, plan.placement, plan.decisions.batch * drafted_rows(plan)
    handed = is_recorded(plan.hardware, placement, decisions.kv) or launched_hands_over(plan.hardware, placement)
    if not decisions.weights.host.compute(rows) or not (handed or rows == decisions.batch):
        return {}
    beside = Beside.of(plan.hardware, plan.model, rows, decisions.weights.forms, reads_layers(placement))
    found = {}
    for unit in placement.host_units:
        spec = placement.part(unit)
        handed_s, ahead_s = beside.handed_s(spec), beside.ahead_s(spec)
        found[unit] = OnHost(ns(handed_s), ns(handed_s - beside.alone_s(spec)), ns(ahead_s))
    return found
