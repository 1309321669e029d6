"""The three places where a page of KV may lie: the pool in VRAM (L1), DRAM (L2), disk (L3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.kv.batch.page_pool import PagePool
from penstock.runtime.kv.disk.disk_pages import DiskPages
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.pages.card_pages import CardPages
from penstock.runtime.kv.pages.dram_pages import DramPages
from penstock.runtime.kv.pages.pool_pages import PoolPages
from penstock.runtime.kv.pages.prompt_pages import Page
from penstock.runtime.kv.pages.slot_bytes import SlotBytes
from penstock.runtime.memory.device import CopyDevice


@dataclass(frozen=True)
class PageMemory:
    """What pages lie in and pass through, taken by the engine with everything else that it takes."""

    pool: PagePool
    buffers: Mapping[int, torch.Tensor]
    """The pool's memory by layer, uint8: where the layer's K and V lie between passes."""
    view: memoryview
    """DRAM for whole records, two at least, page-aligned."""
    tensor: torch.Tensor
    """The same as uint8."""
    device: CopyDevice | None = None
    """The card that ``bounce`` lies on, for ``CardPages``."""
    bounce: torch.Tensor | None = None
    """What pages pass through on the card: [pages, bytes]."""
    stays: bool = False
    """Without a card: whether pages stay in the pool when no sequence holds them any more. On a card they do."""


class Tiers:
    """Pages of ``shape`` by tier. ``card`` is None without a card, and so is ``kept``, the pages in the pool, unless they are to stay: the
    pool then lies in DRAM, whose pages are checked at each use. ``disk`` is None if pages live as long as the process. ``on_evicted`` gets
    a page that is evicted from the pool."""

    def __init__(self, shape: PageShape, memory: PageMemory, disk: DiskPages | None, on_evicted: Callable[[Page], None]):
        self.shape, self.disk, self.device, self.pool = shape, disk, memory.device, memory.pool
        self.dram = DramPages(shape.payload_bytes, memory.view, memory.tensor)
        device = memory.device
        self.slots = SlotBytes(shape, memory.buffers, device.holds if device is not None else lambda held: False)
        self.card = None if device is None or memory.bounce is None else CardPages(device, memory.bounce, self.slots)
        self.kept = None if device is None and not memory.stays else PoolPages(memory.pool, on_evicted)

    def nearest(self, key: bytes) -> Tier | None:
        """Where the page is restored from, which counts as a use in VRAM and DRAM."""
        in_dram = self.dram.slots.find(key) is not None
        if self.kept is not None and self.kept.find(key) is not None:
            return Tier.vram
        if in_dram:
            return Tier.dram
        return Tier.ssd if self.is_on_disk(key) else None

    def is_in_memory(self, key: bytes) -> bool:
        """Whether the page is in VRAM or DRAM, or about to be."""
        return key in self.dram.slots or (self.kept is not None and key in self.kept)

    def is_on_disk(self, key: bytes) -> bool:
        return self.disk is not None and self.disk.lookup([key]) > 0
