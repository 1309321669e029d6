"""What the decisions of a plan may be, where that follows from its machine, its model or its other decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.planner.common.measures import ALIGN, align_up
from penstock.planner.contract.decided.allowed import Allowed, OneOf, Span
from penstock.planner.contract.decided.decisions import (
    CachePolicy,
    Decisions,
    ExpertSlots,
    MissedExperts,
    Tier,
    WeightDecisions,
    WeightForm,
)
from penstock.planner.contract.decided.declared import DECLARED, Declared
from penstock.planner.contract.decided.placement import place
from penstock.planner.contract.decided.recording import prompts_launched_because
from penstock.planner.contract.decided.speculating import Drafter
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import Experts, ModelSpec
from penstock.planner.contract.prices.missed_experts import no_split
from penstock.planner.contract.prices.on_cpu import no_host_attention, no_host_head, no_host_units, rows_timed
from penstock.planner.contract.ranks.rank_parts import never_in_parts
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.contract.rules.rule import BrokenRule

NO_GPU = " without a GPU"
CAP = "cap <= layers through DRAM"
HEADROOM = "hwm = cap + k, 3 <= k <= 10"
AHEAD = "cap <= prefetch_distance <= hwm"
NO_RING = "no VRAM ring without a GPU"
RING = "vram_slots >= vram_prefetch_distance + 2"
KEPT = "resident_layers = cap under pinned, 0 under rolling"
SLOTS = "expert slots"
RECORDED = "prompts that are recorded"
HOST = "units that the CPU computes"


@dataclass(frozen=True)
class Setting:
    """One plan's decisions among what is given: each property is what one of them may be."""

    hardware: HardwareProfile
    model: ModelSpec
    decisions: Decisions

    def allowed(self, one: Declared) -> Allowed:
        """What ``one`` may be here. ValueError for a decision about experts where plan or model has none."""
        if one.owner is ExpertSlots and not self.routed:
            raise ValueError(f"{one.place}: there are no routed experts")
        return one.how.allowed(self) if callable(one.how.allowed) else one.how.allowed

    def broken(self) -> list[BrokenRule]:
        """Every decision that is not what it may be, in the order of a plan's file. What follows from where weights lie is only asked where
        all else is sound: a number outside its range would take as much memory as it says."""
        return list(self._broken(placed=False)) or list(self._broken(placed=True))

    def _broken(self, placed: bool) -> Iterator[BrokenRule]:
        for one in DECLARED:
            if one.how.placed != placed or (one.owner is ExpertSlots and not self.routed):
                continue
            value, allowed = one.of(self.decisions), self.allowed(one)
            if value not in allowed:
                yield broken(one.place, value, allowed)

    @property
    def routed(self) -> bool:
        """Whether plan and model have routed experts."""
        return self.decisions.experts is not None and self.model.experts is not None

    @property
    def gpu(self) -> bool:
        return self.hardware.gpu is not None

    @property
    def weights(self) -> WeightDecisions:
        return self.decisions.weights

    @property
    def experts(self) -> Experts:
        assert self.model.experts is not None
        return self.model.experts

    @property
    def slots(self) -> ExpertSlots:
        assert self.decisions.experts is not None
        return self.decisions.experts

    def resident(self, units: int) -> Span:
        """Of ``units``, those that stay in VRAM."""
        return Span(0, units) if self.gpu else Span(0, 0, why=NO_GPU)

    def forms(self, coded: bool) -> OneOf:
        """Of a kind's units that stay in VRAM, ``coded`` in the checkpoint or not."""
        if not self.gpu or not coded:
            return OneOf((WeightForm.stored,), NO_GPU if coded else ", since nothing of it is coded")
        return OneOf(tuple(WeightForm))

    @property
    def ring_slots(self) -> Span:
        distance = self.weights.vram.prefetch_distance
        if not self.gpu:
            return Span(0, 0, why=NO_GPU, rule=NO_RING)
        return Span(max(0, distance) + LIMITS.ring_margin, why=f" with prefetch_distance={distance}", rule=RING)

    @property
    def ring_ffn_slots(self) -> Span:
        slots = self.weights.vram.slots
        return Span(0, max(0, slots - 1), why=f" with slots={slots}") if self.gpu else Span(0, 0, why=NO_GPU, rule=NO_RING)

    @property
    def ring_distance(self) -> Span:
        return Span() if self.gpu else Span(0, 0, why=NO_GPU, rule=NO_RING)

    @property
    def cap(self) -> Span:
        units = self.weights.vram.resident_units
        through = self.model.layers - (min(units.attn, units.ffn) if self.gpu else 0)
        return Span(0, through, why=", the layers that are not whole in VRAM", rule_above=CAP)

    @property
    def hwm(self) -> Span:
        cap = self.weights.dram.cap_layers
        return Span(cap + LIMITS.headroom_min, cap + LIMITS.headroom_max, why=f" with cap_layers={cap}", rule=HEADROOM)

    @property
    def layers_ahead(self) -> Span:
        cache = self.weights.dram
        why = f" with cap_layers={cache.cap_layers}, hwm_layers={cache.hwm_layers}"
        return Span(cache.cap_layers, cache.hwm_layers, why=why, rule=AHEAD)

    @property
    def resident_layers(self) -> Span:
        cap, policy = self.weights.dram.cap_layers, self.weights.policy
        kept = cap if policy is CachePolicy.pinned else 0
        return Span(kept, kept, why=f" with cap_layers={cap}, policy={policy}", rule=KEPT)

    @property
    def staging(self) -> Span:
        reads = self.weights.ssd
        why = f", {reads.block_bytes} x {reads.queue_depth}"
        return Span(reads.block_bytes * reads.queue_depth, why=why, rule="staging >= block x queue depth")

    @property
    def embedding(self) -> OneOf:
        tiers = (Tier.vram, Tier.dram) if self.gpu else (Tier.dram,)
        return OneOf(tiers, "" if self.gpu else ", since there is no GPU", "embedding tier")

    @property
    def head_blocks(self) -> Span:
        return Span(1, self.model.vocab) if self.gpu else Span(1, 1, why=NO_GPU)

    @property
    def host_ffn(self) -> Span:
        """Units that the CPU computes are FFN units that DRAM keeps, of a step that is recorded or reads layers from the SSD."""
        if why := no_host_units(self.hardware, self.model, self.decisions):
            return Span(0, 0, why=f", since {why}", rule=HOST)
        kept = place(self.model, self.weights, self.gpu).ffn.count(Tier.dram)
        return Span(0, kept, why=", the FFN units that DRAM keeps", rule=HOST)

    @property
    def host_head(self) -> Span:
        """The same of the LM head's blocks."""
        if why := no_host_head(self.hardware, self.model, self.decisions):
            return Span(0, 0, why=f", since {why}", rule=HOST)
        outside = self.weights.head_blocks - self.weights.vram.resident_units.head
        return Span(0, outside, why=", the LM head's blocks outside VRAM", rule=HOST)

    @property
    def host_near(self) -> Span:
        """Of no more units than there are. Without units on the CPU, and for several ranks, which compute in turn, it means nothing."""
        return Span(0, self.model.layers if self.gpu else 0, why=", the model's layers" if self.gpu else NO_GPU, rule=HOST)

    @property
    def host_rows(self) -> Span:
        host, given = self.weights.host, (self.hardware, self.model, self.decisions)
        if (host.ffn and no_host_units(*given)) or (host.head and no_host_head(*given)):
            return Span(0, host.rows, rule=HOST)  # the units are what is refused
        most = rows_timed(self.hardware, self.model, host)
        what = "LM head" if host.head and not host.ffn else "FFNs and the LM head" if host.head else "FFNs"
        why = f" for the format of the {what}" if most else f", since {no_host_units(*given)}"
        return Span(min(most, int(host.count > 0)), most, why=why, rule=HOST)

    @property
    def host_attention(self) -> Span:
        """Layers whose attention the CPU computes lie in DRAM beside a card."""
        if why := no_host_attention(self.hardware, self.model):
            return Span(0, 0, why=f", since {why}", rule=HOST)
        kv = self.decisions.kv
        return Span(0, kv.dram_pages * self.model.layers // max(1, kv.pages), why=", the layers whose KV lies in DRAM", rule=HOST)

    @property
    def drafters(self) -> OneOf:
        """A model drafts where the plan has one, and where none is given nobody can."""
        given = self.decisions.speculation.model is not None
        why = f", since speculation.model {'is' if given else 'is not'} given"
        return OneOf(tuple(drafter for drafter in Drafter if drafter.has_weights == given), why)

    @property
    def part_tokens(self) -> Span:
        if why := never_in_parts(self.model):
            return Span(0, 0, why=f", since {why}")
        return Span(1, also=(0,))

    @property
    def recorded_prompt_tokens(self) -> Span:
        """At least as many as a pass has, or a part of one."""
        d = self.decisions
        outside = d.kv.pages - d.kv.vram_pages
        if why := prompts_launched_because(self.hardware, place(self.model, d.weights, self.gpu), outside):
            return Span(0, 0, why=f", since {why}", rule=RECORDED)
        each = d.prefill_part_tokens or d.batch * d.prefill_chunk_tokens
        return Span(each, also=(0,), why=", the tokens of a part" if d.prefill_part_tokens else ", the tokens of a pass", rule=RECORDED)

    @property
    def page_tokens(self) -> OneOf:
        return OneOf(LIMITS.page_tokens, rule="KV page size")

    @property
    def kept_in_vram(self) -> Span:
        if not self.gpu:
            return Span(0, 0, why=NO_GPU)
        spilled = self.decisions.kv.dram_pages
        return Span(0, 0, why=f" with kv.dram_pages={spilled}") if spilled > 0 else Span()

    @property
    def expert_vram_slots(self) -> Span:
        return self._expert_slots() if self.gpu else Span(0, 0, why=NO_GPU, rule=SLOTS)

    @property
    def expert_dram_slots(self) -> Span:
        everywhere = self.gpu and self.slots.vram_slots >= self.experts.units
        return self._expert_slots((0,) if everywhere else ())

    def _expert_slots(self, also: tuple[int, ...] = ()) -> Span:
        experts, passing = self.experts, fewest_slots(self.experts)
        why = f" (one token's experts in a layer are {experts.top_k}, {passing} pass through at once, all are {experts.units})"
        return Span(passing, experts.units, also=also, step=len(experts.layers), why=why, rule=SLOTS)

    @property
    def one_tokens(self) -> Span:
        return Span(0, self.experts.top_k, why=", the experts of one token")

    @property
    def missed_experts(self) -> OneOf:
        why = no_split(self.hardware, self.model)
        return OneOf((MissedExperts.copied,), f", since {why}", HOST) if why else OneOf(tuple(MissedExperts), rule=HOST)

    @property
    def read_ahead(self) -> Span:
        return self.one_tokens if self.gpu else Span(0, 0, why=" without a GPU, where experts.prefetch is what the SSD reads")

    @property
    def expert_chunk(self) -> Span:
        """At least the smallest measured copy, at most the largest one or a whole expert. If an expert is smaller than every measured copy:
        at least 4096 bytes."""
        whole, gpu = align_up(self.experts.expert_bytes), self.hardware.gpu
        sizes = [size for size, _ in gpu.h2d.points] if gpu else [ALIGN, 2**30]
        return Span(min(sizes) if whole >= min(sizes) else ALIGN, max(whole, max(sizes)))


def broken(place: str, value: Any, allowed: Allowed) -> BrokenRule:
    """The rule that ``value`` at ``place`` breaks."""
    field = place.rpartition(".")[2]
    said = f"{place}={value}; allowed: {allowed.words}{allowed.why}; set {field}={allowed.nearest(value)}"
    return BrokenRule(allowed.rule_of(value, place), said)
