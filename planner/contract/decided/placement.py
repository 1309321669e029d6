"""Which unit lives where: the counts of a plan laid out over the layers, the same for planner and runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from penstock.planner.contract.decided.decisions import CachePolicy, Tier, WeightDecisions, WeightForm
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec


@dataclass(frozen=True)
class Unit:
    """The smallest piece of weights that moves as a whole. For ``head``, ``layer`` is the row block's index."""

    kind: str
    """``attn``, ``ffn``, ``expert``, ``head``, or ``kv`` for a layer's KV where that streams."""
    layer: int
    expert: int | None = None
    """Of an ``expert`` unit: which of its layer's routed experts. An ``ffn`` unit is what else is in ``mlp``."""

    def __str__(self) -> str:
        return f"{self.kind}.{self.layer}" if self.expert is None else f"{self.kind}.{self.layer}.{self.expert}"

    @property
    def ring_class(self) -> str:
        """The class of VRAM slots that it streams through: LM-head blocks share the FFN units'."""
        return self.kind if self.kind in ("attn", "kv") else "ffn"


def even(count: int, total: int, turn: int = 0, turns: int = 1) -> list[int]:
    """``count`` of ``total`` positions of a cycle, gaps between them differing by at most one (Bresenham, centred). Of ``turns`` cycles
    side by side that of number ``turn``: those of all together are evenly spread."""
    return [(2 * (j * turns + turn) + 1) * total // (2 * count * turns) for j in range(count)]


def filled(count: int, total: int, taken: Sequence[int]) -> list[int]:
    """``count`` more of ``total`` positions of a cycle beside those that are ``taken``, one at least: each divides the widest of the gaps
    between these, and those of one gap lie evenly in it."""
    gaps = [after - at - 1 for at, after in pairwise([*taken, taken[0] + total])]
    parts = [1] * len(gaps)
    for _ in range(count):
        widest = max(range(len(gaps)), key=lambda n: (gaps[n] + 1) / parts[n] if parts[n] <= gaps[n] else 0)
        parts[widest] += 1
    return sorted(
        (at + part * (gap + 1) // each) % total for at, gap, each in zip(taken, gaps, parts, strict=True) for part in range(1, each)
    )


def split(positions: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """``count`` of ``positions``, taken evenly, and the rest."""
    taken = {positions[i] for i in even(count, len(positions))}
    return sorted(taken), [p for p in positions if p not in taken]


@dataclass(frozen=True)
class Placement:
    """Where each unit lives in the steady state, and the bytes that follow from it.

    ``attn``, ``ffn`` and ``head`` give each unit's tier; ``ssd`` units pass through DRAM, and on a machine with a GPU
    ``dram`` and ``ssd`` units pass through the VRAM ring.
    """

    model: ModelSpec
    weights: WeightDecisions
    gpu: bool
    attn: tuple[Tier, ...]
    ffn: tuple[Tier, ...]
    head: tuple[Tier, ...]

    @cached_property
    def units(self) -> tuple[tuple[Unit, Tier], ...]:
        """Every unit with its tier, in the order of one forward pass."""
        order: list[tuple[Unit, Tier]] = []
        for i in range(self.model.layers):
            order += [(Unit("attn", i), self.attn[i])] if self.model.attn_bytes[i] else []
            order.append((Unit("ffn", i), self.ffn[i]))
        return tuple(order + [(Unit("head", j), tier) for j, tier in enumerate(self.head)])

    @cached_property
    def alike(self) -> Mapping[tuple[int, Tier], int]:
        """(Stored bytes, tier) -> how many units are so, in the order of a forward pass."""
        return Counter((self.unit_bytes(unit), tier) for unit, tier in self.units)

    @cached_property
    def resident_sizes(self) -> Mapping[int, int]:
        """Bytes of a unit as VRAM keeps it -> how many units are so; none without a GPU."""
        return Counter(self.kept_bytes(unit) for unit, tier in self.units if self.gpu and tier is Tier.vram)

    def unit_bytes(self, unit: Unit) -> int:
        """Stored bytes of ``unit``; LM-head blocks are equal, the last one may be smaller."""
        return self.head_block_bytes if unit.kind == "head" else self.spec(unit).stored_bytes

    def spec(self, unit: Unit) -> UnitSpec:
        """What ``unit`` is, or is a row block of."""
        return self.model.lm_head if unit.kind == "head" else self.model.of_kind(UnitKind(unit.kind))[unit.layer]

    def part(self, unit: Unit) -> UnitSpec:
        """``unit`` by itself: of an LM head the one block."""
        return head_block(self.model, self.weights.head_blocks) if unit.kind == "head" else self.spec(unit)

    def form(self, unit: Unit) -> WeightForm:
        """In which form ``unit`` is kept where it lies."""
        stays = self.gpu and self.lies(unit) is Tier.vram
        return WeightForm.decoded if stays and unit.kind in self.weights.forms.decoded else WeightForm.stored

    def lies(self, unit: Unit) -> Tier:
        """Where ``unit`` lives in the steady state."""
        return {"attn": self.attn, "ffn": self.ffn, "head": self.head}[unit.kind][unit.layer]

    def kept_bytes(self, unit: Unit) -> int:
        """Bytes of ``unit`` in the form in which it is kept."""
        return self.spec(unit).decoded_bytes if self.form(unit) is WeightForm.decoded else self.unit_bytes(unit)

    @property
    def head_block_bytes(self) -> int:
        return head_block_bytes(self.model, self.weights.head_blocks)

    @cached_property
    def dram_layers(self) -> tuple[int, ...]:
        """Layers that pass through or stay in DRAM: those with a unit outside VRAM, in visiting order."""
        tiers = zip(self.attn, self.ffn, strict=True)
        return tuple(i for i, pair in enumerate(tiers) if pair != (Tier.vram, Tier.vram))

    @cached_property
    def ssd_layers(self) -> tuple[int, ...]:
        """Layers read from SSD once a pass in the steady state."""
        return tuple(i for i in self.dram_layers if Tier.ssd in (self.attn[i], self.ffn[i]))

    @cached_property
    def resident_layers(self) -> frozenset[int]:
        """Layers that never leave the DRAM cache."""
        return frozenset(self.dram_layers) - frozenset(self.ssd_layers)

    def layer_dram_bytes(self, layer: int) -> int:
        """Bytes of ``layer`` that pass through DRAM."""
        attn = 0 if self.attn[layer] is Tier.vram else self.model.attn_bytes[layer]
        return attn + (0 if self.ffn[layer] is Tier.vram else self.model.ffn_bytes[layer])

    @property
    def dram_slot_bytes(self) -> int:
        """One slot of the DRAM cache: it fits every layer that passes through."""
        return max((self.layer_dram_bytes(i) for i in self.dram_layers), default=0)

    @property
    def dram_slots(self) -> int:
        """Slots that the cache really needs: HWM, or every layer when fewer."""
        return min(self.weights.dram.hwm_layers, len(self.dram_layers))

    @cached_property
    def ssd_bytes_per_pass(self) -> int:
        return sum(self.layer_dram_bytes(i) for i in self.ssd_layers)

    @cached_property
    def streamed_units(self) -> tuple[Unit, ...]:
        """Units that pass through the VRAM ring once a pass, in order; none without a GPU."""
        return tuple(u for u, tier in self.units if tier is not Tier.vram) if self.gpu else ()

    @cached_property
    def host_units(self) -> tuple[Unit, ...]:
        """Units that the CPU computes in decode steps of at most ``weights.host.rows`` rows, in order; none without a GPU. They lie in
        DRAM, evenly spread between those that stream, so that link and CPU work at the same time; ranks in turns have theirs so. What comes
        from the SSD streams where it is; the others that stream divide the layers between. Of the LM head
        they are the last blocks: the CPU begins with them when the card begins with the first. Any other pass streams them, too."""
        outside = [i for i, tier in enumerate(self.ffn) if tier is not Tier.vram]
        read = [at for at, i in enumerate(outside) if self.ffn[i] is Tier.ssd]
        count, dealt = min(self.weights.host.ffn, len(outside) - len(read)) if self.gpu else 0, self.model.dealt
        turn, turns = (dealt.rank, dealt.count) if dealt is not None and dealt.in_turns else (0, 1)
        if read and count:
            streams = {*read, *filled(len(outside) - len(read) - count, len(outside), read)}
            ffn = tuple(Unit("ffn", i) for at, i in enumerate(outside) if at not in streams)
        else:
            ffn = tuple(Unit("ffn", outside[at]) for at in even(count, len(outside), turn, turns))
        blocks = min(self.weights.host.head, self.head.count(Tier.dram)) if self.gpu else 0
        return ffn + tuple(Unit("head", j) for j in range(len(self.head) - blocks, len(self.head)))

    @cached_property
    def step_units(self) -> tuple[Unit, ...]:
        """Units that pass through the VRAM ring in such a decode step, in order."""
        host = frozenset(self.host_units)
        return tuple(unit for unit in self.streamed_units if unit not in host)

    @cached_property
    def h2d_bytes_per_pass(self) -> int:
        return sum(self.unit_bytes(u) for u in self.streamed_units)

    @cached_property
    def ring_classes(self) -> dict[str, tuple[int, int]]:
        """Slot class -> (slots, bytes of one slot). ``attn`` and ``ffn``; LM-head blocks use ``ffn`` slots."""
        return ring_classes(
            self.weights.vram.slots,
            self.weights.vram.ffn_slots,
            max((self.unit_bytes(u) for u in self.streamed_units if u.ring_class == "attn"), default=0),
            max((self.unit_bytes(u) for u in self.streamed_units if u.ring_class == "ffn"), default=0),
        )

    @property
    def ring_bytes(self) -> int:
        return sum(slots * size for slots, size in self.ring_classes.values())

    @property
    def head_dram_bytes(self) -> int:
        """DRAM that the embedding table and the LM head take outside the layer cache."""
        head_in_dram = not self.gpu or Tier.dram in self.head
        embed_in_dram = self.weights.embedding is Tier.dram
        if self.model.tied:
            return self.model.embed_bytes if head_in_dram or embed_in_dram else 0
        blocks = sum(tier is Tier.dram for tier in self.head)
        head = min(blocks * self.head_block_bytes, self.model.head_bytes) if self.gpu else self.model.head_bytes
        return (self.model.embed_bytes if embed_in_dram else 0) + head

    @property
    def embed_vram_bytes(self) -> int:
        """VRAM of the embedding table: nothing extra when it is tied to an LM head that is resident."""
        if not self.gpu or self.weights.embedding is not Tier.vram:
            return 0
        return 0 if self.model.tied and Tier.dram not in self.head else self.model.embed_bytes


def head_block_limit(model: ModelSpec) -> int:
    """The most bytes of a row block of the LM head: an FFN unit's slot, which it uses. Where routed experts are units of their own, an FFN
    unit may be no more than a router. A block may then be as large as an attention unit."""
    return max(model.attn_max, model.ffn_max) if model.experts else model.ffn_max


def head_blocks(model: ModelSpec) -> int:
    """The fewest equal row blocks of the LM head within that limit."""
    limit = head_block_limit(model)
    blocks = -(-model.lm_head_bytes // limit)
    while blocks < model.vocab and head_block_bytes(model, blocks) > limit:
        blocks += 1
    return max(1, min(blocks, model.vocab))


def head_block(model: ModelSpec, blocks: int) -> UnitSpec:
    """One of ``blocks`` row blocks of the LM head, tied or not."""
    head = model.lm_head
    return replace(head, kind=UnitKind.head, stored_bytes=head_block_bytes(model, blocks), elements=-(-head.elements // blocks))


def head_block_bytes(model: ModelSpec, blocks: int) -> int:
    """Bytes of one of ``blocks`` row blocks of the LM head (rows rounded up)."""
    row = model.lm_head_bytes // model.vocab
    return -(-model.vocab // blocks) * row


def slots_of_both(slots: int, ffn_slots: int) -> tuple[int, int]:
    """Of ``slots`` those of attention and of FFN, where both stream: FFN has ``ffn_slots``, or half of them where that is 0. An odd one is
    attention's, which is the smaller."""
    ffn = ffn_slots or slots // 2
    return slots - ffn, ffn


def ring_classes(slots: int, ffn_slots: int, attn_slot: int, ffn_slot: int) -> dict[str, tuple[int, int]]:
    """Divide ``slots`` between the kinds that stream, as :func:`slots_of_both` has it; a kind that does not stream (0 bytes) gets none."""
    if attn_slot and ffn_slot:
        attn, ffn = slots_of_both(slots, ffn_slots)
        return {"attn": (attn, attn_slot), "ffn": (ffn, ffn_slot)}
    return {kind: (slots, size) for kind, size in (("attn", attn_slot), ("ffn", ffn_slot)) if size}


@lru_cache(maxsize=64)
def place(model: ModelSpec, weights: WeightDecisions, gpu: bool) -> Placement:
    """Spread the plan's counts over the layers so that no link waits for a run of the others. Kept for the next time: a plan is predicted
    for many machines.

    The SSD's layers are placed first, since the SSD is the slowest link, then the VRAM's among the others. Layers that miss only
    one unit in VRAM are the first to be left to the SSD, since they need the fewest reads.
    """
    n = model.layers
    resident = weights.vram.resident_units if gpu else None
    attn, ffn = (resident.attn, resident.ffn) if resident else (0, 0)
    whole = min(attn, ffn)
    through_dram = n - whole
    kept = weights.dram.resident_layers if weights.policy is CachePolicy.pinned else 0
    fits = through_dram <= weights.dram.hwm_layers
    from_ssd = 0 if fits else through_dram - min(kept, through_dram)
    partial = max(attn, ffn) - whole
    partial_ssd = min(from_ssd, partial)
    ssd, rest = split(range(n), from_ssd)
    vram, dram = split(rest, whole)
    lacks_one = {*split(ssd, partial_ssd)[0], *split(dram, partial - partial_ssd)[0]}
    tier = dict.fromkeys(ssd, Tier.ssd) | dict.fromkeys(vram, Tier.vram) | dict.fromkeys(dram, Tier.dram)
    ffn_tiers = tuple(Tier.vram if i in lacks_one and ffn > attn else tier[i] for i in range(n))
    attn_tiers = tuple(Tier.vram if i in lacks_one and attn > ffn else tier[i] for i in range(n))
    attn_tiers = tuple(own if size else other for own, other, size in zip(attn_tiers, ffn_tiers, model.attn_bytes, strict=True))
    head_resident = resident.head if resident else 0
    head = (Tier.vram,) * head_resident + (Tier.dram,) * (weights.head_blocks - head_resident)
    return Placement(model, weights, gpu, attn_tiers, ffn_tiers, head)
