"""KV that lies on the SSD between visits: read ahead into DRAM slots, new tokens written behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import align_down, align_up
from penstock.planner.common.timeline.spans import SSD_WRITE
from penstock.planner.contract.policy.rolling import RollingPolicy
from penstock.runtime.kv.outside.kv_scratch import Scratch
from penstock.runtime.kv.outside.living_rows import Spans, united
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.moving.dram_cache import LayerCache
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.reading.pending import Done
from penstock.runtime.reading.reader import Reads
from penstock.runtime.store.base import Extent

Slot = tuple[torch.Tensor, memoryview]
"""The same DRAM as a tensor (uint8) and as bytes."""


class _Written(NamedTuple):
    layer: int
    slot: int
    new: Spans
    wanted: Spans
    after: Event | None


class SpillHome:
    """Layers in ``scratch``, each ``layer_bytes`` (a multiple of 4096). The first visits read ``wanted`` of their buffers.

    ``slots`` of DRAM hold the layers in transit, from the beginning of a layer's read until its new tokens are written. With a slot for
    each layer nothing is read again. A layer is read again only when its tokens of the pass before are written. ``device`` is None if
    tokens are complete when they are given back.
    """

    def __init__(
        self,
        wanted: Mapping[int, Spans],
        layer_bytes: int,
        slots: Sequence[Slot],
        reads: Reads,
        scratch: Scratch,
        device: CopyDevice | None,
        ledger: Ledger,
    ):
        self._at = {layer: i * layer_bytes for i, layer in enumerate(wanted)}
        self._slots, self._reads, self._scratch, self._device, self._ledger = slots, reads, scratch, device, ledger
        self._held = {layer: _in_blocks(parts) for layer, parts in wanted.items()}
        """Bytes of each layer that its next visit reads, in whole blocks of 4096."""
        self._taken: dict[int, int] = {}
        self._later: dict[int, Callable[[], None]] = {}
        self._lock = threading.Condition()
        self._reading = 0
        self._error: BaseException | None = None
        count = len(slots)
        policy = RollingPolicy(tuple(wanted), max(1, count - 1), count, count - 1)
        self._cache = LayerCache(policy, count, self._read)
        self._cache.preload(wait=False)
        self._queue: SimpleQueue[_Written | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="penstock-kv-writer", daemon=True)
        self._writer.start()

    def there(self, layer: int) -> bool:
        return self._cache.holds(layer) and layer not in self._taken

    def take(self, layer: int) -> torch.Tensor:
        with self._lock:
            self._lock.wait_for(lambda: layer not in self._taken or self._error is not None)
            self._raise_if_broken()
        try:
            slot = self._cache.acquire(layer)
        except UserError:
            self._raise_if_broken()
            raise
        with self._lock:
            self._taken[layer] = slot
        return self._slots[slot][0]

    def give_back(self, layer: int, new: Spans, wanted: Spans, after: Event | None) -> None:
        self._queue.put(_Written(layer, self._taken[layer], new, wanted, after))

    def close(self) -> None:
        self._queue.put(None)
        self._writer.join()
        self._cache.close()
        with self._lock:
            self._later.clear()
            self._lock.wait_for(lambda: not self._reading)

    def _read(self, layer: int, slot: int, done: Done) -> None:
        """Read what the next visit wants, once the visit before is over."""
        with self._lock:
            if layer in self._taken:
                self._later[layer] = lambda: self._read(layer, slot, done)
                return
            held = self._held[layer]
            self._reading += bool(held)
        if not held:
            done(None)
            return

        def over(error: BaseException | None) -> None:
            done(error)
            with self._lock:
                self._reading -= 1
                self._lock.notify_all()

        extents = tuple(Extent(self._scratch.path, self._at[layer] + begin, end - begin, begin) for begin, end in held)
        self._reads.read(extents, self._slots[slot][1], over, f"kv.{layer}")

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._write(item)
                except BaseException as error:  # raised where the next layer is taken
                    self._error = error
                    self._cache.close()
            with self._lock:
                del self._taken[item.layer]
                self._held[item.layer] = _in_blocks(item.wanted)
                later = self._later.pop(item.layer, None)
                self._lock.notify_all()
            self._cache.release(item.layer)
            if later is not None:
                later()

    def _write(self, item: _Written) -> None:
        if item.after is not None and self._device is not None:
            self._device.host_waits(item.after)
        blocks, begun = _in_blocks(item.new), time.perf_counter()
        try:
            for first, last in blocks:
                self._scratch.write(self._slots[item.slot][1][first:last], self._at[item.layer] + first)
        except OSError as error:
            why = f"KV of layer {item.layer} could not be written ({error.strerror})"
            raise UserError(f"{why}; check the disk of kv.scratch_dir") from error
        self._ledger.add(SSD_WRITE, f"kv.{item.layer}", begun, time.perf_counter(), sum(last - first for first, last in blocks))

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error


def _in_blocks(parts: Spans) -> Spans:
    """``parts`` in whole blocks. What shares a block with tokens that live, lives as well or is written before it is read."""
    return united((align_down(first), align_up(last)) for first, last in parts)
