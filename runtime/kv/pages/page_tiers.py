"""The three places where a page of KV may lie: VRAM (L1), DRAM (L2), disk (L3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.kv.disk.disk_pages import DiskPages
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.pages.card_pages import CardPages
from penstock.runtime.kv.pages.dram_pages import DramPages
from penstock.runtime.memory.device import CopyDevice


@dataclass(frozen=True)
class PageMemory:
    """Memory for pages of all layers, taken by the engine with everything else that it takes."""

    view: memoryview
    """DRAM for whole pages, two at least, page-aligned."""
    tensor: torch.Tensor
    """The same as uint8."""
    device: CopyDevice | None = None
    """The card that ``bounce`` and ``kept`` lie on, for ``CardPages``."""
    bounce: torch.Tensor | None = None
    kept: torch.Tensor | None = None


class Tiers:
    """Pages of ``shape`` by tier. ``card`` is None where there is none, ``disk`` where pages live as long as the process."""

    def __init__(self, shape: PageShape, memory: PageMemory, disk: DiskPages | None):
        self.shape, self.disk, self.device = shape, disk, memory.device
        self.dram = DramPages(shape.payload_bytes, memory.view, memory.tensor)
        self.card: CardPages | None = None
        if memory.device is not None:
            self.card = CardPages(memory.device, memory.bounce, memory.kept, shape.page_tokens)

    def nearest(self, key: bytes) -> Tier | None:
        """Where the page is restored from, which counts as a use in VRAM and DRAM."""
        in_dram = self.dram.slots.find(key) is not None
        if self.card is not None and self.card.slots.find(key) is not None:
            return Tier.vram
        if in_dram:
            return Tier.dram
        return Tier.ssd if self.is_on_disk(key) else None

    def is_in_memory(self, key: bytes) -> bool:
        """Whether the page is in VRAM or DRAM, or about to be."""
        return key in self.dram.slots or (self.card is not None and key in self.card.slots)

    def is_on_disk(self, key: bytes) -> bool:
        return self.disk is not None and self.disk.lookup([key]) > 0
