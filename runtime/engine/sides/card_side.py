"""The VRAM side of an engine: one allocation divided, and the ring that streams units through its slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch

from penstock.planner.common.measures import align_up
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.decided.recording import reads_layers
from penstock.planner.contract.policy.turns import Turns
from penstock.planner.contract.policy.walk import Walk
from penstock.runtime.engine.sides.host_side import HostSide
from penstock.runtime.handed.ring_turns import Standing, Walked
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.memory.pieces import cut
from penstock.runtime.memory.vram import TENSOR_ALIGN, VramPool
from penstock.runtime.model.decoded import DecodedUnit
from penstock.runtime.model.fixtures import Fixture
from penstock.runtime.moving.device_layout import DeviceLayout, device_layout
from penstock.runtime.moving.ring import UnitSource, VramRing
from penstock.runtime.moving.stream import Rehearsal, RingStream
from penstock.runtime.recorded.recorded_stream import EXACTLY, RecordedStream, Recorder, Streamed


class CardSide:
    """What an engine has in VRAM beside activations and the KV that stays there: taken at once, in one block."""

    def __init__(self, host: HostSide, copier: CopyDevice, device: torch.device):
        weights, placement, options = host.placement.weights, host.placement, host.options
        streamed = {u: device_layout(host.layouts[u]) for u in placement.streamed_units}
        fixed = [(f, _with_room(f)) for f in host.fixtures if f.tier is Tier.vram]
        size = {name: max((x.nbytes for u, x in streamed.items() if u.ring_class == name), default=0) for name in ("attn", "ffn")}
        counts = {name: count for name, (count, _) in placement.ring_classes.items()}
        kv_count, kv_bytes = host.kv.ring_slots, align_up(host.kv.layer_bytes)
        experts, expert_bytes = (0, 0) if host.experts is None else host.experts.room.vram_share
        room = options.page_room
        ring_bytes = sum(count * size[name] for name, count in counts.items())
        slots_bytes = ring_bytes + kv_count * kv_bytes + experts * expert_bytes + room.vram_bytes
        self.vram = VramPool(sum(x.nbytes for _, x in fixed) + slots_bytes, device)
        self.fixed = [(f, layout, self.vram.take(layout.nbytes)) for f, layout in fixed]
        """What stays here, with its layout and its place."""
        self._ledger, self._dram, self._spans = host.ledger, host.dram, options.keep_spans
        self.slots = slots = {name: [self.vram.take(size[name]) for _ in range(count)] for name, count in counts.items()}
        self.kv_slots = [self.vram.take(kv_bytes) for _ in range(kv_count)]
        self.expert_slots = [self.vram.take(expert_bytes) for _ in range(experts)]
        self.bounce = self.vram.take(room.vram_bytes).view(room.bounce_pages, room.page_bytes)
        """What kept pages of KV pass through: [pages, page_bytes]."""
        self._streamed, self._pieces = streamed, {u: tuple(cut(x.segments, weights.h2d.chunk_bytes)) for u, x in streamed.items()}
        self._ring_of = partial(
            VramRing,
            pieces=self._pieces.__getitem__,
            slots=slots,
            device=copier,
            distance=weights.vram.prefetch_distance,
            in_flight=weights.h2d.in_flight,
            ledger=host.ledger,
            wrap=options.wrap_around,
            balance=max(1, weights.vram.prefetch_distance) if options.balance_units is None else options.balance_units,
        )
        self._keep = options.keep_finished_units
        hands_over = bool(placement.host_units) and reads_layers(placement)
        self.walk = Walk.of(placement) if hands_over else None
        """What the ring and :meth:`another_ring` ask DRAM for, where the SSD is read in passes that hand units over."""
        self.ring = self._open(placement.streamed_units, host.dram, self._keep)
        self._stream_of = partial(RingStream, dram=host.dram, device=copier, ledger=host.ledger)
        tensors = {u: x.tensors for u, x in streamed.items()}
        self.stream = self._stream_of(self.ring, layouts=tensors)
        self.rehearsal = Rehearsal(tensors, lambda u: slots[u.ring_class][0])

    def another_ring(self, units: Sequence[Unit]) -> tuple[VramRing, RingStream]:
        """For passes that stream ``units`` alone through the same slots, while :attr:`ring` rests. They stay in DRAM, but for what
        :attr:`walk` says. A unit stays in its slot after it was left as long as in :attr:`ring`, or as far as their slots allow."""
        keep, counts = self._keep, {name: len(buffers) for name, buffers in self.slots.items()}
        if keep and units:
            keep = min(keep, Turns([unit.ring_class for unit in units], counts, 1).shortest_round - 1)
        ring = self._open(units, Standing(self._dram), keep)
        return ring, self._stream_of(ring, layouts={u: self._streamed[u].tensors for u in units})

    def _open(self, units: Sequence[Unit], source: UnitSource, keep: int) -> VramRing:
        """A ring for ``units``, which come from ``source``, or as :attr:`walk` has it."""
        walk = self.walk
        if walk is not None:
            source = Walked(walk, self._dram)
        return self._ring_of(units=units, source=source, keep=keep, late=walk.late(units) if walk else ())

    @cached_property
    def from_dram(self) -> Mapping[Unit, Streamed]:
        """What streams and lies in DRAM for good, in pieces."""
        passing = self.walk.passing if self.walk else frozenset[Unit]()
        stays = {u: x for u, x in self._streamed.items() if u not in passing}
        return {u: Streamed(u, self._dram.stays(u), self._pieces[u], x.tensors) for u, x in stays.items()}

    def recorded(self, recorder: Recorder, units: Sequence[Unit], like: RecordedStream | None = None) -> RecordedStream:
        """For passes that are recorded: ``units`` of those through the ring's slots; going on from those ``like`` them."""
        streamed = [self.from_dram[unit] for unit in units]
        return RecordedStream(streamed, self.slots, recorder, self._ledger, 1 if self._spans else EXACTLY, like=like)

    @property
    def streamed_into(self) -> list[torch.Tensor]:
        """All places that something moves through."""
        return [*self.ring.slots, *self.kv_slots, *self.expert_slots]


def _with_room(fixture: Fixture) -> DeviceLayout:
    """How ``fixture`` lies in VRAM, with room for what it becomes once it has arrived: at its end, where it will be decoded."""
    found = device_layout(fixture.layout)
    ends = [align_up(t.offset + t.nbytes, TENSOR_ALIGN) for t in fixture.bound(found.tensors)]
    nbytes = max([found.nbytes, *ends])
    if not isinstance(fixture.cast, DecodedUnit):
        return replace(found, nbytes=nbytes)
    before = nbytes - found.nbytes
    tensors = tuple(replace(t, offset=t.offset + before) for t in found.tensors)
    return DeviceLayout(nbytes, tensors, tuple(replace(s, dst=s.dst + before) for s in found.segments))
