"""What a plan's decisions cost: seconds per stage and phase, and bytes per tier, from scratch and without side effects."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.planner.common.measures import GB
from penstock.planner.contract.bills.prefill import Prefill
from penstock.planner.contract.bills.reuse import expected
from penstock.planner.contract.bills.ring_slots import first_pass_bytes, head_start
from penstock.planner.contract.bills.routed import Streamed, routed_s
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.placement import place
from penstock.planner.contract.decided.recording import launched_hands_over, launching
from penstock.planner.contract.decided.speculating import Speculation
from penstock.planner.contract.experts.expert_misses import misses, visit
from penstock.planner.contract.experts.expert_slots import kept_at_first
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Objective, Workload
from penstock.planner.contract.prices.memory_law import dram_items, dram_use, held_by, shapes_wanted, ssd_items, used_bytes, vram_items
from penstock.planner.contract.prices.price import Price, Resource, computing_of
from penstock.planner.contract.prices.stages import (
    FIXED,
    decode_compute_s,
    kv_fill,
    ssd_gbps,
)
from penstock.planner.contract.speculation.chain_length import best_length
from penstock.planner.contract.speculation.drafting import counted_s, counted_tokens
from penstock.planner.contract.speculation.resident_drafter import resident

WAITED = 0.5
"""Of a pass: until the next one begins, for a request that comes at any moment."""


@dataclass(frozen=True)
class Prediction:
    """What a plan promises.

    Seconds of resources are sums over a phase. A phase lasts as long as its slowest resource, and longer by three terms: a prefill by
    restoring its prompts' prefixes, a decode step by what its routers hold up, each pass by the profile's ``pass_s``.
    """

    load_s: float
    """From the imports' end to the first request: filling the residents of every tier, page-locking, loading kernels. The page cache is
    taken to be cold; a run, which can look, predicts this figure anew."""
    ttft_s: float
    """Mean over the workload's batches, of which the first finds slots full (``HeadStart``). Of a server: half a pass, and the prefill."""
    prefill_s: float
    """Of a batch behind another one; a server's, of one prompt beside rows that decode."""
    decode_s_per_token: float
    """One decode step: a token for each sequence of the batch."""
    decode_tokens_per_s: float
    bottleneck_prefill: Resource
    bottleneck_decode: Resource
    ssd_bytes_per_token: int
    """Read from SSD per decode step."""
    h2d_bytes_per_token: int
    """Copied to the device per decode step."""
    vram_bytes: int
    dram_bytes: int
    ssd_bytes: int
    total_s: float
    """What the program minimises: see ``objective_weights`` and ``with_wait``."""
    prefill_stages: dict[str, float]
    """Resource -> seconds over the whole prefill."""
    decode_stages: dict[str, float]
    """Resource -> seconds of one decode step."""
    restored_tokens: int = 0
    """At the head of each prompt, whose KV was kept and is restored."""
    restore_s: float = 0.0
    """Of the prefill: restoring them."""
    experts_missed_vram: float = 0.0
    """Of the routed experts that a decode step visits, in all layers: the share that VRAM does not have. 0 without a GPU."""
    experts_missed_dram: float = 0.0
    """The share that no memory has."""
    tokens_a_pass: float = 1.0
    """That a decode step gives each sequence: more where drafts are verified, by the acceptance that the plan counts on."""
    drafts_kept: float = 0.0
    """That acceptance: the share of drafts that are kept, of those whose forerunners are. 0 where nobody drafts."""


def objective_weights(workload: Workload, batch: int, chunk_tokens: int) -> tuple[float, float]:
    """Weights of (prefill seconds, seconds of one decode step) in the objective.

    ``latency``: every request served, in whole batches. ``throughput``: the same for an endless stream, so batches count in
    parts. ``ttft``: the prefill, with decode to break ties.

    Of a server the prefill is that of one prompt, beside rows that decode. ``throughput``: seconds of every request while all rows are in
    use (:class:`Turn`). ``latency``: mean seconds from a client's question to the last token, where all clients ask, or of a request that
    finds a row free (:func:`with_wait`); until a pass begins, half of one is over.
    """
    if workload.is_served:
        turn = workload.turn(batch, chunk_tokens)
        if workload.objective is Objective.throughput:
            share = workload.requests / batch
            return share * turn.carrying / turn.parts, share * turn.plain
        share = 1.0 if workload.arrivals_per_s else max(1.0, workload.clients / batch)
        return share * turn.carrying / turn.parts + 1, share * turn.plain + WAITED
    if workload.objective is Objective.ttft:
        return 1.0, FIXED.ttft_decode_weight * workload.new_tokens
    if workload.objective is Objective.throughput:
        return workload.requests / batch, workload.requests / batch * workload.new_tokens
    batches = waves(workload, batch)
    return batches, batches * workload.new_tokens


def with_wait(workload: Workload, batch: int, total_s: float) -> float:
    """The objective whose phases sum up to ``total_s``: with the wait for a row, where requests come to a server at random moments. Grows
    with ``total_s``.

    S seconds of a request in one of R rows, at a rate of requests r, with the spread s of lengths:

        load = r * S / R
        wait = (1 + s^2) / 2 * S / R * load^(sqrt(2 * (R + 1)) - 1) / (1 - load)

    (Sakasegawa 1977, for a queue before R servers.) No more clients than the workload's ever wait, so a request never takes longer than
    with all of them there.
    """
    if not workload.is_served or not workload.arrivals_per_s or workload.objective is not Objective.latency:
        return total_s
    crowded_s, load = max(1.0, workload.clients / batch) * total_s, workload.arrivals_per_s * total_s / batch
    if load >= 1:
        return crowded_s
    varied = (1 + workload.length_spread**2) / 2
    wait_s = varied * total_s / batch * load ** (math.sqrt(2 * (batch + 1)) - 1) / (1 - load)
    return min(total_s + wait_s, crowded_s)


def waves(workload: Workload, batch: int) -> int:
    """Batches that serve every request, one after the other."""
    return -(-workload.requests // batch)


def predict(
    hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions, drafting: PhaseSeconds | None = None
) -> Prediction:
    """The prediction for ``decisions``, whoever made them; they must hold the rules of ``penstock.planner.contract.rules``. ``drafting`` is
    that of a model that drafts on another rank (:func:`drafter_alone`), for whose steps this one waits."""
    phases = Phases.of(hardware, model, workload, decisions)
    plain, drafted = _undrafted(phases), _drafted(phases, drafting)
    if drafted is None:
        return plain
    waited = WAITED if workload.is_served else 0.0
    return replace(
        plain,
        ttft_s=plain.ttft_s + waited * (drafted.step_s - plain.decode_s_per_token),
        decode_s_per_token=drafted.step_s,
        decode_tokens_per_s=decisions.batch * drafted.tokens / drafted.step_s,
        tokens_a_pass=drafted.tokens,
        drafts_kept=decisions.speculation.acceptance,
        total_s=drafted.total_s,
    )


def objective_s(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> float:
    """``predict(...).total_s``, in half the time: nothing else is predicted."""
    phases = Phases.of(hardware, model, workload, decisions)
    drafted = _drafted(phases, None)
    return drafted.total_s if drafted else phases.total_s


@dataclass(frozen=True)
class PhaseSeconds:
    """Of a model where nobody drafts."""

    prefill_s: float
    decode_s: float
    """One decode step."""


@dataclass(frozen=True)
class Phases:
    """The prefill of a plan's batch and a decode step behind it, where nobody drafts."""

    prefill: Prefill
    start: int
    """Tokens at the head of each prompt that are restored."""
    restore_s: float
    bill: Price
    """The prefill's."""
    step: Price
    seconds: PhaseSeconds

    @classmethod
    def of(cls, hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> Phases:
        """By ``decisions``."""
        prefill = Prefill(hardware, model, workload, decisions)
        start, restore_s = expected(prefill)
        bill, step = prefill.bill(start), prefill.step()
        return cls(prefill, start, restore_s, bill, step, PhaseSeconds(restore_s + prefill.seconds(start), step_s(prefill, step)))

    @property
    def total_s(self) -> float:
        """:attr:`Prediction.total_s`."""
        workload, decisions = self.prefill.workload, self.prefill.decisions
        prefill_weight, decode_weight = objective_weights(workload, decisions.batch, decisions.prefill_chunk_tokens)
        return with_wait(workload, decisions.batch, prefill_weight * self.seconds.prefill_s + decode_weight * self.seconds.decode_s)


@dataclass(frozen=True)
class Drafted:
    """What becomes of decode steps where tokens are drafted."""

    step_s: float
    tokens: float
    """That a step gives each sequence."""
    total_s: float
    """:attr:`Prediction.total_s`."""


def _drafted(phases: Phases, drafting: PhaseSeconds | None) -> Drafted | None:
    """None where no chain is drafted. ``drafting`` as :func:`predict` has it."""
    hardware, model = phases.prefill.hardware, phases.prefill.model
    workload, decisions = phases.prefill.workload, phases.prefill.decisions
    alone = drafting or drafter_alone(hardware, model, workload, decisions)
    length = chain_in(hardware, model, workload, decisions, alone)
    if not length:
        return None
    drafted = replace(decisions.speculation, tokens=length)
    verified_s = verify_s(hardware, model, workload, replace(decisions, speculation=drafted), alone)
    mean_s, tokens = counted_s(drafted, phases.seconds.decode_s, verified_s), counted_tokens(drafted, length)
    prefill_weight, decode_weight = objective_weights(workload, decisions.batch, decisions.prefill_chunk_tokens)
    whole = WAITED if workload.is_served and workload.objective is not Objective.throughput else 0.0
    prefill_s = phases.seconds.prefill_s + (alone.prefill_s if alone else 0.0)
    phases_s = prefill_weight * prefill_s + (decode_weight - whole) * mean_s / tokens + whole * mean_s
    return Drafted(mean_s, tokens, with_wait(workload, decisions.batch, phases_s))


def chain_in(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions, alone: PhaseSeconds | None) -> int:
    """Tokens drafted behind each of ``decisions.batch`` sequences: as decided. A server has fewer where that many rows are better off with
    fewer, or where a pass has no room for more. ``alone`` as :func:`verify_s` has it."""
    decided = decisions.speculation
    if not workload.is_served or not decided.tokens:
        return decided.tokens

    def pass_s(drafts: int) -> float:
        return verify_s(hardware, model, workload, replace(decisions, speculation=replace(decided, tokens=drafts)), alone)

    plain_s = pass_s(0)

    def worth(drafts: int) -> float:
        return counted_tokens(decided, drafts) / counted_s(decided, plain_s, pass_s(drafts))

    return best_length(min(decided.tokens, decisions.prefill_chunk_tokens // decisions.batch), worth)


def verify_s(
    hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions, alone: PhaseSeconds | None = None
) -> float:
    """Seconds of a decode step in which each sequence computes its last token and as many drafted ones as ``decisions`` have. Drafting is
    counted: a model that drafts, which promises ``alone``, takes a step for each token of the chain. Meanwhile the link fills the ring.

    Priced as a step of so many rows: :func:`verified`. Where no pass of all sequences and so many tokens is recorded, it is launched kernel
    by kernel, and the CPU computes units where other launched steps have it do so.
    """
    drafts, machine, priced = decisions.speculation.tokens, hardware, decisions
    shapes = shapes_wanted(hardware, model, decisions)
    if drafts and not any(shape.rows >= decisions.batch and shape.tokens > drafts for shape in shapes):
        machine = launching(hardware, model)
        if not launched_hands_over(hardware, place(model, decisions.weights, hardware.gpu is not None)):
            priced = replace(decisions, weights=replace(decisions.weights, host=HostUnits()))
    drafting_s = drafts * alone.decode_s if alone else 0.0
    prefill = Prefill(machine, model, *verified(workload, priced))
    step = prefill.step()
    if drafting_s:
        step += Price({Resource.h2d: -min(drafting_s, head_start(machine, model, prefill.decisions).h2d_s)})
    return drafting_s + step_s(prefill, step)


def verified(workload: Workload, decisions: Decisions) -> tuple[Workload, Decisions]:
    """What a step that verifies is priced as: one of a row for each token. Its weights, experts and products are those of the rows
    together. Such a step reads KV once a row, this one once a sequence, so the rows' prompts are that much shorter."""
    tokens = decisions.speculation.tokens + 1
    streamed = replace(decisions.kv, host_layers=0)  # the CPU attends to one token of each sequence alone
    rows = replace(decisions, batch=decisions.batch * tokens, speculation=Speculation(), kv=streamed)
    return replace(workload, prompt_tokens=max(1, workload.prompt_tokens // tokens)), rows


def drafter_alone(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> PhaseSeconds | None:
    """Of the model that drafts for ``model``, as if it were asked for nothing else; None where none does. Its step takes what runs found,
    by its price where none has timed it."""
    drafter, timed_s = decisions.speculation.model, decisions.speculation.step_s
    if drafter is None:
        return None
    kept = resident(drafter, decisions, model.layers, hardware.gpu is not None)
    found = Phases.of(as_drafting(hardware), drafter, workload, kept).seconds
    return replace(found, decode_s=timed_s) if timed_s else found


def as_drafting(hardware: HardwareProfile) -> HardwareProfile:
    """``hardware`` as a model that drafts finds it: ``pass_s`` is what passes of the model beside it were found to take, once each, however
    many steps drafted for it."""
    return replace(hardware, pass_s=0.0)


def _undrafted(phases: Phases) -> Prediction:
    """Of a plan where nobody drafts."""
    prefill, start, restore_s = phases.prefill, phases.start, phases.restore_s
    hardware, model, workload, decisions = prefill.hardware, prefill.model, prefill.workload, prefill.decisions
    prefill_s, decode_s = phases.seconds.prefill_s, phases.seconds.decode_s
    moved, fill = prefill.moved, kv_fill(workload)
    missed = misses(model, decisions.experts, decisions.batch, hardware.gpu is not None)
    placement = place(model, decisions.weights, hardware.gpu is not None)
    ahead = head_start(hardware, model, decisions)
    first_s = restore_s + prefill.first_seconds(start, ahead.ssd_s, ahead.h2d_s)
    copied = min(missed.dram, missed.vram) + moved.missed.copied * missed.from_dram
    expert_bytes, visited = 0, 1.0
    if model.experts:
        expert_bytes, visited = model.experts.expert_bytes, len(model.experts.layers) * visit(model.experts, decisions.batch).touched
    held = held_by(hardware, model, workload, decisions)
    return Prediction(
        load_s=load_s(hardware, model, workload, decisions),
        ttft_s=prefill_s + (WAITED * decode_s if workload.is_served else (first_s - prefill_s) / waves(workload, decisions.batch)),
        prefill_s=prefill_s,
        decode_s_per_token=decode_s,
        decode_tokens_per_s=decisions.batch / decode_s,
        bottleneck_prefill=phases.bill.slowest,
        bottleneck_decode=phases.step.slowest,
        ssd_bytes_per_token=placement.ssd_bytes_per_pass + round(fill * moved.kv_ssd_bytes + missed.dram * expert_bytes),
        h2d_bytes_per_token=moved.step_bytes + round(fill * moved.step_kv_h2d_bytes + copied * expert_bytes),
        vram_bytes=used_bytes(vram_items(hardware, model, workload, held)),
        dram_bytes=used_bytes(dram_items(hardware, model, workload, held)),
        ssd_bytes=used_bytes(ssd_items(model, held)),
        total_s=phases.total_s,
        prefill_stages={str(resource): s for resource, s in phases.bill.by_resource().items()},
        decode_stages={str(resource): s for resource, s in phases.step.by_resource().items()},
        restored_tokens=start,
        restore_s=restore_s,
        experts_missed_vram=missed.vram / visited,
        experts_missed_dram=missed.dram / visited,
    )


def step_s(prefill: Prefill, step: Price) -> float:
    """Seconds of one decode step, whose bill is ``step``."""
    hardware, model, workload, decisions = prefill.hardware, prefill.model, prefill.workload, prefill.decisions
    missed = misses(model, decisions.experts, decisions.batch, hardware.gpu is not None)
    moved = prefill.moved
    streamed_s = moved.step.of(Resource.h2d) + kv_fill(workload) * moved.step_kv.read.of(Resource.h2d)
    compute_s = decode_compute_s(hardware, model, workload, decisions.batch)
    streamed = Streamed(streamed_s, moved.head.of(Resource.h2d), moved.ahead.of(Resource.h2d))
    routed = routed_s(hardware, model, decisions.batch, step.of(computing_of(hardware)), compute_s, streamed, missed, moved)
    return max(routed, step.lasts()) + hardware.pass_s


def load_s(
    hardware: HardwareProfile,
    model: ModelSpec,
    workload: Workload,
    decisions: Decisions,
    cached: float = 0.0,
    imports_s: float | None = None,
) -> float:
    """Seconds from the imports' end to the first prefill, with a share ``cached`` of the weights in the page cache. Reading, page-locking,
    which begins before the imports, and the first use of every kernel overlap. Of experts those are read that either tier
    keeps, once each. ``imports_s``: what imports took that are over."""
    loaded = model.weight_bytes - first_pass_bytes(place(model, decisions.weights, hardware.gpu is not None))
    if model.experts and decisions.experts:
        slots = decisions.experts
        kept = kept_at_first(model.experts, slots.vram_slots if hardware.gpu else 0, slots.dram_slots)
        loaded -= (model.experts.units - kept) * model.experts.expert_bytes
    loaded += decisions.speculation.model.weight_bytes if decisions.speculation.model else 0
    ssd_rate = ssd_gbps(hardware, decisions.weights.ssd.block_bytes, decisions.weights.ssd.queue_depth)
    read_s = loaded / GB * ((1 - cached) / ssd_rate + cached / hardware.copying_gbps)
    beside_s = FIXED.imports_s if imports_s is None else imports_s
    pin_s = max(0.0, pinned_gb(hardware, model, workload, decisions) * hardware.pin_s_per_gb - beside_s)
    kernels_s = FIXED.first_kernels_s if imports_s is None else FIXED.first_kernels_share * imports_s
    first_s = kernels_s if hardware.gpu else FIXED.first_passes * decode_compute_s(hardware, model, workload, decisions.batch)
    return max(read_s, pin_s, first_s) + hardware.start_s


def pinned_gb(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> float:
    """GB of DRAM that a start faults in, and locks for a GPU."""
    return used_bytes(dram_use(hardware, model, workload, decisions)) / GB
