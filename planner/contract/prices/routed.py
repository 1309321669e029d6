"""What a router's late word costs a decode step: experts cannot be fetched before they are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.planner.common.measures import GB
from penstock.planner.contract.experts.expert_misses import Misses, Visit, visit
from penstock.planner.contract.experts.expert_slots import kept_in_all
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile
from penstock.planner.contract.given.model import Experts, ModelSpec
from penstock.planner.contract.prices.launches import issue_s
from penstock.planner.contract.prices.memory_law import expert_vram_bytes
from penstock.planner.contract.prices.prefill import Moved
from penstock.planner.contract.prices.price import Amount, Resource
from penstock.planner.contract.prices.stages import weight_pass_s, weight_read_s

PAUSE_AT = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Reads a step at which the line that touches :func:`behind_last` stands for it."""


@dataclass(frozen=True)
class Routed:
    """What of a decode step cannot overlap, since a layer's experts are known only when its router has computed.

    A layer computes attention and router, then its missed experts arrive while the others compute, then the last one computes. Between
    no expert missed (all compute, nothing fetched) and all u missed (u fetched one after the other, meanwhile u - 1 compute) the time is
    taken as linear, which is never less. So a step takes its whole compute, and for each expert missed what it is on its way, less
    (u - 1) / u of one expert's compute. A copy to a GPU is only queued, and while it is on its way the host issues what comes until the
    next router: of a layer that misses all, what issuing takes longer than reading its weights is hidden, too. For an expert that is
    read from the SSD the host waits.

    Experts from DRAM arrive beside those from the SSD, but only those of the same layer. Of many experts a layer, each layer has its
    share of both, and the slower link counts; of one, it is the one or the other, and both add up. Shares of u experts vary by
    1 / sqrt(u), so as much of the time is taken as added up.

    Weights that stream are copied beside experts, too, which arrive later for it: they hide behind compute only in the share of the
    time in which no expert is copied. With E of copying experts and C of compute that is C / (C + E): all of them where no expert is
    missed, as in a dense model, nearly none where most of a step is experts on their way. E is taken as of a plan that streams
    nothing but experts: one that streams some weights keeps few experts more, and so the time is linear in what is decided.

    What routers asked beforehand name early enough overlaps with everything. Early enough is as many layers ahead as pass while one
    expert is copied, L / m where copies bind that a step of L layers makes m times; a name's chance is taken to fall with each layer
    alike: ``foreseen ** max(1, L / m)`` of the misses, m as of a plan that streams nothing but experts.

    Of that share the SSD is idle between tokens: nothing names a token's experts before its first router has spoken, and behind a token's
    last read its other layers compute and copy. Reads fall on layers at random, r a step, so (1 - exp(-r)) / r of the slower of both is
    behind the last, copies as of a plan that streams nothing but experts.

    Where all experts are touched, they are known before the router has spoken: then all overlaps, and nothing of this remains.
    """

    alone: float = 0.0
    """Share of the compute that nothing is fetched beside."""
    computed_s: float = 0.0
    """Compute that goes on while one missed expert arrives."""
    issued_s: float = 0.0
    """Issuing that goes on besides while one is copied."""
    apart: float = 0.0
    """Share of the time in which reads and copies do not overlap."""
    exposed: float = 0.0
    """Share of the weights that stream which hides behind nothing."""
    named: float = 0.0
    """Share of the missed experts that routers name early enough."""
    copies_s: float = 0.0
    """Of a step, as of a plan that streams nothing but experts."""

    @classmethod
    def of(cls, hardware: HardwareProfile, model: ModelSpec, batch: int) -> Routed:
        """For a decode step of ``batch`` sequences."""
        if model.experts is None:
            return cls()
        one = visit(model.experts, batch)
        u, foreseen, missed = one.touched, model.experts.foreseen, 0.0
        if hardware.gpu:
            missed = _missed_beside_layers(hardware.gpu, hardware.vram_bytes, model, model.experts, one)
            foreseen **= max(1.0, len(model.experts.layers) / max(missed, 1.0))
        alone, named = (1 - one.spread) * (1 - foreseen), (1 - one.spread) * foreseen
        computed_s = alone * (u - 1) / u * model.experts.expert_bytes / hardware.weight_gbps / GB
        issued_s = exposed = copies_s = 0.0
        if hardware.gpu:
            hidden_s = max(0.0, issue_s(hardware, model, batch) - weight_read_s(hardware, model, batch))
            issued_s = alone * hidden_s / (u * len(model.experts.layers))
            copies_s = missed * model.experts.expert_bytes / hardware.gpu.h2d.peak / GB
            exposed = alone * copies_s / (weight_pass_s(hardware, model, batch) + copies_s)
        return cls(alone, computed_s, issued_s, alone / math.sqrt(u), exposed, named, copies_s)

    def read_s(self, fetch_s: float) -> float:
        """What an expert that is ``fetch_s`` on its way from the SSD adds to a step."""
        return max(0.0, fetch_s - self.computed_s)

    def copy_s(self, fetch_s: float) -> float:
        """The same from DRAM to the device."""
        return max(0.0, fetch_s - self.computed_s - self.issued_s)


def behind_last(read: float) -> tuple[float, float]:
    """(what it would be with no read, what each read more changes) of the line that touches (1 - exp(-m)) / m at ``read``: the mean part of
    a step behind the last of m reads, Poisson's number of them, all of the step where there is none. The curve is nowhere below."""
    if not read:
        return 1.0, -0.5
    part, gone = -math.expm1(-read) / read, math.exp(-read)
    each = (gone - part) / read
    return part - each * read, each


def _missed_beside_layers(gpu: Gpu, vram_bytes: int, model: ModelSpec, experts: Experts, one: Visit) -> float:
    """Experts of all layers that VRAM misses which keeps all that is no expert, and as many experts as there is room for."""
    others = sum(model.attn_bytes) + sum(model.ffn_bytes) + model.lm_head_bytes + model.norm_bytes + gpu.context_bytes
    slots = max(0, vram_bytes - others) // expert_vram_bytes(experts)
    return len(experts.layers) * one.missed(kept_in_all(experts, slots) / len(experts.layers))


@dataclass(frozen=True)
class Fetched:
    """Experts that a decode step misses, and what each is on its way. Numbers for a plan, expressions in the integer program."""

    read: Sequence[tuple[Amount, float]]
    """From the SSD: (how many, seconds of one), for each way in which a step may read."""
    copied: Amount
    """To the card, those from the SSD among them."""
    copy_s: float
    any_read: Amount
    """1 where any is read, else 0."""

    @property
    def from_dram(self) -> Amount:
        return self.copied - sum(count for count, _ in self.read)


def held_up(routed: Routed, compute: Amount, step_s: float, streamed: Amount, fetched: Fetched, unit_s: float = 1.0) -> Iterator[Amount]:
    """What a step that its routers hold up lasts at least, in units of ``unit_s``: each of these.

    ``compute``: of the whole step, ``step_s`` of it without looking embeddings up; ``streamed``: copying what streams beside experts. An
    expert is copied piece by piece while it is read.
    """
    copy = routed.copy_s(fetched.copy_s) / unit_s
    reads = [(count, routed.read_s(fetch_s) / unit_s) for count, fetch_s in fetched.read]
    read, beside = sum(count for count, _ in reads), routed.exposed * streamed
    apart = sum(count * max(each, copy) for count, each in reads) + fetched.from_dram * copy + beside
    reading, most = sum(count * each for count, each in reads), routed.named * max(step_s, routed.copies_s) / unit_s
    pauses = [most * (none * fetched.any_read + each * read) for none, each in map(behind_last, PAUSE_AT)] if routed.named else []
    for together in (reading, *(reading + pause for pause in pauses), fetched.copied * copy + beside):
        yield routed.alone * compute + (1 - routed.apart) * together + routed.apart * apart


def routed_s(
    hardware: HardwareProfile,
    model: ModelSpec,
    batch: int,
    compute_s: float,
    step_s: float,
    streamed_s: float,
    missed: Misses,
    moved: Moved,
) -> float:
    """Seconds of a decode step that its routers hold up; 0 for a dense model."""
    if model.experts is None:
        return 0.0
    read = [(missed.dram, moved.expert_read.of(Resource.ssd))]
    fetched = Fetched(read, missed.vram, moved.expert_copied.of(Resource.h2d), missed.dram > 0)
    return max(held_up(Routed.of(hardware, model, batch), compute_s, step_s, streamed_s, fetched))
