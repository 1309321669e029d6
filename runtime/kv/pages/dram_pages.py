"""The L2 tier of the prefix cache: pages in a region of the engine's arena. A card copies from it and a disk reads into it directly."""

from __future__ import annotations

import torch

from penstock.runtime.kv.disk.page_record import checksum_of
from penstock.runtime.kv.pages.page_slots import Slots


class DramPages:
    """Slots of ``page_bytes`` each in ``view``, which ``tensor`` shares: page-aligned, page-locked where the arena is. ``slots`` says which
    page lies where.

    Each page comes with its checksum, which is compared each time that it leaves.
    """

    def __init__(self, page_bytes: int, view: memoryview, tensor: torch.Tensor):
        self.slots = Slots(len(view) // page_bytes)
        self.nbytes = self.slots.count * page_bytes
        self._views = [view[i * page_bytes : (i + 1) * page_bytes] for i in range(self.slots.count)]
        self._tensor = tensor[: self.nbytes].view(self.slots.count, page_bytes)
        self._sums = [0] * self.slots.count

    def view(self, slot: int) -> memoryview:
        return self._views[slot]

    def tensor(self, slot: int) -> torch.Tensor:
        """uint8 [page_bytes]"""
        return self._tensor[slot]

    def seal(self, slot: int, checksum: int) -> None:
        """The slot's bytes are those of its page from now on, whose ``checksum_of`` this is."""
        self._sums[slot] = checksum

    def is_sound(self, slot: int) -> bool:
        """Whether they still are."""
        return self._sums[slot] == checksum_of(self._views[slot])
