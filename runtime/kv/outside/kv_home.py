"""Where KV lies between a layer's visits when that is not where it is computed with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from penstock.runtime.kv.outside.living_rows import Spans
from penstock.runtime.memory.device import CopyDevice, Event


class KvHome(Protocol):
    """K and V of some layers, each in one buffer (uint8). In each pass a layer is taken, its new tokens are written, and it is given back.
    One thread takes layers in the order of a pass."""

    def there(self, layer: int) -> bool:
        """Whether :meth:`take` would return at once."""

    def take(self, layer: int) -> torch.Tensor:
        """The layer's buffer, as it was given back. Blocks until it is there."""

    def give_back(self, layer: int, new: Spans, wanted: Spans, after: Event | None) -> None:
        """Bytes ``new`` are new, once ``after`` has happened; the next visit reads those of ``wanted``. Never blocks."""

    def close(self) -> None:
        """Nobody takes anything any more. Returns when the buffers are still."""


class DramHome:
    """Each layer has a region of page-locked DRAM for good."""

    def __init__(self, regions: Mapping[int, torch.Tensor], device: CopyDevice):
        self._regions = regions
        self._device = device
        self._written: dict[int, Event | None] = {}

    def there(self, layer: int) -> bool:
        after = self._written.get(layer)
        return after is None or self._device.done(after)

    def take(self, layer: int) -> torch.Tensor:
        after = self._written.get(layer)
        if after is not None:
            self._device.host_waits(after)
        return self._regions[layer]

    def give_back(self, layer: int, new: Spans, wanted: Spans, after: Event | None) -> None:
        self._written[layer] = after

    def close(self) -> None:
        """Regions stay as they are."""
