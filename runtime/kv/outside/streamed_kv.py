"""KV of layers that a plan keeps outside VRAM: in ahead of a layer's attention, its new tokens out behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from penstock.planner.common.timeline.spans import D2H, KV
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.kv.outside.kv_home import KvHome
from penstock.runtime.kv.outside.living_rows import LivingRows, Spans
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.memory.pieces import Segment, cut
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.moving.ring import VramRing


class KvStream(Protocol):
    """Layers outside VRAM, brought to where they are computed with; see ``KvPlace``. A layer's tokens take ``token_bytes`` each."""

    def begin_pass(self) -> None: ...

    def enter(self, layer: int, token_bytes: int) -> torch.Tensor: ...

    def written(self, layer: int, token_bytes: int) -> None: ...

    def leave(self, layer: int, token_bytes: int) -> None: ...

    def close(self) -> None:
        """Nothing moves any more; what was computed lies where it belongs."""


class _Stored(NamedTuple):
    """Tokens in transit from the card: the events before and behind their copies."""

    unit: Unit
    begun: Event
    end: Event
    nbytes: int


class RingKv:
    """On a GPU: layers pass through ``slots`` of VRAM, each of which fits a whole layer, ``device``'s copy streams beside the weights'.

    ``homes`` say where each layer lies otherwise, ``wanted`` what the first visits read. A layer's bytes come in as soon as a slot is
    free, since its visit in the pass before must be over: ``slots`` less than layers.
    """

    def __init__(
        self,
        homes: Mapping[int, KvHome],
        wanted: Mapping[int, Spans],
        living: LivingRows,
        slots: Sequence[torch.Tensor],
        device: CopyDevice,
        chunk_bytes: int,
        in_flight: int,
        ledger: Ledger,
    ):
        self._homes, self._wanted, self._living = homes, dict(wanted), living
        self._device, self._chunk_bytes, self._ledger = device, chunk_bytes, ledger
        self._out = device.lane()
        self._at: dict[int, torch.Tensor] = {}
        self._buffer = slots[0]
        self._new: Spans = ()
        self._storing: deque[_Stored] = deque()
        self._stored_s = 0.0
        units = [Unit("kv", layer) for layer in sorted(homes)]
        distance = min(len(slots), len(units) - 1)
        self._ring = VramRing(units, self._pieces, {"kv": slots}, self, device, distance, in_flight, ledger, track=KV)
        self._ring.start()

    def begin_pass(self) -> None:
        self._ring.begin_pass()

    def enter(self, layer: int, token_bytes: int) -> torch.Tensor:
        _, self._buffer = self._ring.enter(Unit("kv", layer))
        return self._buffer

    def written(self, layer: int, token_bytes: int) -> None:
        self._new = self._living.new(token_bytes)
        computed = self._device.compute_event()
        self._out.waits(computed)
        self._out.copy((self._at[layer][first:last], self._buffer[first:last]) for first, last in self._new)
        stored = self._out.event()
        self._storing.append(_Stored(Unit("kv", layer), computed, stored, sum(last - first for first, last in self._new)))

    def leave(self, layer: int, token_bytes: int) -> None:
        self._wanted[layer] = self._living.wanted(layer, token_bytes)
        self._homes[layer].give_back(layer, self._new, self._wanted[layer], self._storing[-1].end)
        self._out.waits(self._device.compute_event())
        self._ring.leave(Unit("kv", layer), self._out.event())
        self._book()

    def close(self) -> None:
        """Stop the copies; those that are queued finish first."""
        for home in set(self._homes.values()):
            home.close()
        self._ring.close()
        self._device.host_waits(self._device.compute_event())  # kernels that read the slots
        for stored in self._storing:
            self._device.host_waits(stored.end)
        self._book()

    def arrived(self, unit: Unit) -> bool:
        return self._homes[unit.layer].there(unit.layer)

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]:
        held = self._at[unit.layer] = self._homes[unit.layer].take(unit.layer)
        return held.data_ptr(), held

    def release(self, unit: Unit) -> None:
        """A layer is given back when the copies of its new tokens are queued."""

    def _pieces(self, unit: Unit) -> Sequence[Segment]:
        wanted = [Segment(first, first, last - first) for first, last in self._wanted[unit.layer]]
        return tuple(cut(wanted or [Segment(0, 0, 0)], self._chunk_bytes))

    def _book(self) -> None:
        while self._storing and self._device.done(self._storing[0].end):
            stored = self._storing.popleft()
            end_s = self._device.time_of(stored.end)
            start_s = min(end_s, max(self._device.time_of(stored.begun), self._stored_s))
            self._ledger.add(D2H, str(stored.unit), start_s, end_s, stored.nbytes)
            self._stored_s = end_s


class HostKv:
    """Without a GPU: layers of ``home`` are computed with where it holds them."""

    def __init__(self, home: KvHome, living: LivingRows):
        self._home, self._living = home, living

    def begin_pass(self) -> None:
        """Nothing to do: layers are read ahead of their turn all the time."""

    def enter(self, layer: int, token_bytes: int) -> torch.Tensor:
        return self._home.take(layer)

    def written(self, layer: int, token_bytes: int) -> None:
        """Tokens are written back when the layer is left."""

    def leave(self, layer: int, token_bytes: int) -> None:
        self._home.give_back(layer, self._living.new(token_bytes), self._living.wanted(layer, token_bytes), None)

    def close(self) -> None:
        self._home.close()


class RehearsedKv:
    """Every layer in the same ``slot``, whatever lies there, and nothing moves."""

    def __init__(self, slot: torch.Tensor):
        self._slot = slot

    def begin_pass(self) -> None:
        """Nothing moves."""

    def enter(self, layer: int, token_bytes: int) -> torch.Tensor:
        return self._slot

    def written(self, layer: int, token_bytes: int) -> None:
        """Whatever lies there serves."""

    def leave(self, layer: int, token_bytes: int) -> None:
        """Nothing was held."""

    def close(self) -> None:
        """Nothing to end."""
