"""KV of layers that a plan keeps outside VRAM: in ahead of a layer's attention, its new rows out behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from penstock.planner.common.timeline.spans import D2H, KV
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.kv.batch.contiguous import first_seen
from penstock.runtime.kv.batch.kv_block import Pair
from penstock.runtime.kv.batch.kv_home import KvHome
from penstock.runtime.kv.batch.kv_rows import Rows
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.memory.pieces import Segment, cut
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.moving.ring import VramRing


class KvStream(Protocol):
    """What a layer outside VRAM, or on its way, writes to: one batch, or a rehearsal."""

    def begin_pass(self) -> None: ...

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor, start: int) -> Pair:
        """See ``KvPlace``."""

    def pretend(self, layer: int, tokens: int) -> None: ...

    def leave(self, layer: int) -> None:
        """Everything that reads what :meth:`append` gave was issued. Nothing when the layer was not visited."""

    def close(self) -> None:
        """The batch is over."""


class StreamedPlace:
    """One layer of a ``KvStream`` as its cache layer sees it. ``between`` gives K and V of ``batch`` sequences between passes."""

    def __init__(self, stream: KvStream, layer: int, between: Callable[[int, int], Pair]):
        self._stream = stream
        self._layer = layer
        self._between = between

    def append(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> Pair:
        return self._stream.append(self._layer, keys, values, start)

    def pretend(self, tokens: int) -> None:
        self._stream.pretend(self._layer, tokens)

    def pair(self, batch: int) -> Pair:
        return self._between(self._layer, batch)


class _Stored(NamedTuple):
    """Rows on their way out: the events before and behind their copy."""

    unit: Unit
    begun: Event
    end: Event
    nbytes: int


class RingKv:
    """On a GPU: layers pass through ``slots`` of VRAM, each of which fits a whole layer, ``device``'s copy streams beside the weights'.

    ``homes`` say where each layer lies otherwise, ``windows`` how much of it attention sees. A layer's bytes come in as soon as a
    slot is free, since its visit in the pass before must be over: ``slots`` less than layers. ``rows`` of earlier batches, or of a
    rehearsal, are needed where tokens lie there before the first pass.
    """

    def __init__(
        self,
        homes: Mapping[int, KvHome],
        windows: Mapping[int, int | None],
        rows: dict[int, Rows],
        slots: Sequence[torch.Tensor],
        device: CopyDevice,
        chunk_bytes: int,
        in_flight: int,
        ledger: Ledger,
    ):
        self._homes, self._windows, self._rows, self._slots = homes, windows, rows, slots
        self._device, self._chunk_bytes, self._in_flight, self._ledger = device, chunk_bytes, in_flight, ledger
        self._out = device.lane()
        self._tokens = dict.fromkeys(homes, 0)
        self._at: dict[int, torch.Tensor] = {}
        self._open: tuple[int, int, int, Event] | None = None
        self._storing: deque[_Stored] = deque()
        self._stored_s = 0.0
        self._ring: VramRing | None = None

    def begin_pass(self) -> None:
        """The first one starts the copies: until then tokens may be brought by other means."""
        if self._ring is None:
            units = [Unit("kv", layer) for layer in sorted(self._homes)]
            distance = min(len(self._slots), len(units) - 1)
            slots, copies = {"kv": self._slots}, (distance, self._in_flight, self._ledger)
            self._ring = VramRing(units, self._pieces, slots, self, self._device, *copies, track=KV)
            self._ring.start()
        self._ring.begin_pass()

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor, start: int) -> Pair:
        _, buffer = self._ring.enter(Unit("kv", layer))
        rows = self._rows[layer] = Rows.of(keys, values)
        end = start + keys.shape[-2]
        pair = rows.append(buffer, keys, values, start)
        first, last = start * rows.nbytes, end * rows.nbytes
        written = self._device.compute_event()
        self._out.waits(written)
        self._out.copy([(self._at[layer][first:last], buffer[first:last])])
        stored = self._out.event()
        self._storing.append(_Stored(Unit("kv", layer), written, stored, last - first))
        self._tokens[layer] = end
        self._open = layer, first, last, stored
        return pair

    def pretend(self, layer: int, tokens: int) -> None:
        self._tokens[layer] = tokens

    def leave(self, layer: int) -> None:
        if self._open is None or self._open[0] != layer:
            return
        _, first, last, stored = self._open
        self._open = None
        self._homes[layer].give_back(layer, first, last, self._seen(layer).src, stored)
        self._out.waits(self._device.compute_event())
        self._ring.leave(Unit("kv", layer), self._out.event())
        self._book()

    def close(self) -> None:
        """Stop the copies; those that are queued finish first."""
        for home in set(self._homes.values()):
            home.close()
        if self._ring is not None:
            self._ring.close()
        for stored in self._storing:
            self._device.host_waits(stored.end)
        self._book()

    def arrived(self, unit: Unit) -> bool:
        return self._homes[unit.layer].there(unit.layer)

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]:
        held = self._at[unit.layer] = self._homes[unit.layer].take(unit.layer)
        return held.data_ptr(), held

    def release(self, unit: Unit) -> None:
        """A layer is given back when its new rows are on their way."""

    def _pieces(self, unit: Unit) -> Sequence[Segment]:
        return tuple(cut([self._seen(unit.layer)], self._chunk_bytes))

    def _seen(self, layer: int) -> Segment:
        """What the layer's next visit reads of the tokens before it."""
        tokens = self._tokens[layer]
        if not tokens:
            return Segment(0, 0, 0)
        row, first = self._rows[layer].nbytes, first_seen(tokens, self._windows[layer])
        return Segment(first * row, first * row, (tokens - first) * row)

    def _book(self) -> None:
        while self._storing and self._device.done(self._storing[0].end):
            stored = self._storing.popleft()
            end_s = self._device.time_of(stored.end)
            start_s = min(end_s, max(self._device.time_of(stored.begun), self._stored_s))
            self._ledger.add(D2H, str(stored.unit), start_s, end_s, stored.nbytes)
            self._stored_s = end_s


class HostKv:
    """Without a GPU: layers of ``home`` are computed with where it holds them."""

    def __init__(self, home: KvHome, windows: Mapping[int, int | None]):
        self._home = home
        self._windows = windows
        self._open: tuple[int, int, int, int] | None = None

    def begin_pass(self) -> None:
        """Nothing to do: layers are read ahead of their turn all the time."""

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor, start: int) -> Pair:
        rows, end = Rows.of(keys, values), start + keys.shape[-2]
        pair = rows.append(self._home.take(layer), keys, values, start)
        self._open = layer, start * rows.nbytes, end * rows.nbytes, first_seen(end, self._windows[layer]) * rows.nbytes
        return pair

    def pretend(self, layer: int, tokens: int) -> None:
        if tokens:
            raise RuntimeError("KV on the SSD comes from computing alone")

    def leave(self, layer: int) -> None:
        if self._open is not None and self._open[0] == layer:
            self._home.give_back(*self._open, None)
            self._open = None

    def close(self) -> None:
        self._home.close()


class RehearsedKv:
    """Every layer in the same ``slot``, whatever lies there, and nothing moves. Notes the shape of each layer's ``rows``; RuntimeError
    where ``capacity`` tokens are more than was planned for."""

    def __init__(self, slot: torch.Tensor, capacity: int, rows: dict[int, Rows]):
        self._slot = slot
        self._capacity = capacity
        self._rows = rows

    def begin_pass(self) -> None:
        """Nothing moves."""

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor, start: int) -> Pair:
        rows = self._rows[layer] = Rows.of(keys, values)
        if self._capacity * rows.nbytes > self._slot.numel():
            raise RuntimeError(f"KV of layer {layer}: {self._capacity} tokens of {rows.nbytes} bytes, planned are {self._slot.numel()}")
        return rows.append(self._slot, keys, values, start)

    def pretend(self, layer: int, tokens: int) -> None:
        """Whatever lies there serves."""

    def leave(self, layer: int) -> None:
        """Nothing was held."""

    def close(self) -> None:
        """Nothing to end."""
