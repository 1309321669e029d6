"""What a DRAM cache policy is: accesses in, loads and evictions out, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Load:
    """Bring ``layer`` from SSD to DRAM. ``prefetch`` is False when the consumer already waits for it."""

    layer: int
    prefetch: bool


@dataclass(frozen=True)
class Evict:
    """Give ``layer``'s slot back, once the consumer has left it. ``in_window`` says that it will be wanted again soon."""

    layer: int
    in_window: bool


@dataclass(frozen=True)
class Step:
    """What one access causes, in order. ``shrink`` is set when the high-water mark was reached."""

    hit: bool
    actions: tuple[Load | Evict, ...]
    shrink: bool = False


class LayerPolicy(Protocol):
    """Decides which layers the DRAM cache holds, from the sequence of accesses alone.

    Its answers never depend on time, so a simulation and a run with the same accesses see the same loads and evictions.
    Never more than ``hwm`` layers are held between two actions.
    """

    hwm: int

    @property
    def held(self) -> tuple[int, ...]:
        """Layers that are held, in the policy's own order: all that its answers depend on."""

    def preload(self) -> tuple[int, ...]:
        """Layers to load before the first access, in order."""

    def access(self, layer: int) -> Step:
        """The consumer turns to ``layer`` and has left every layer before it."""
