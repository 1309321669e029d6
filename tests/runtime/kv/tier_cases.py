"""What the tests of tiers share: prompts, the order of a device's work, and where a request's tokens came from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.runtime.kv.batches import SHAPE

PAGE = SHAPE.payload_bytes
STEM = [(7 * i) % 251 + 1 for i in range(100)]
OTHER = [(11 * i) % 241 + 1 for i in range(100)]


def first(enabled: Sequence[str]) -> str:
    return enabled[0]


def last(enabled: Sequence[str]) -> str:
    return enabled[-1]


def at_random(seed: int) -> Callable[[Sequence[str]], str]:
    return random.Random(seed).choice


def tokens(facts: dict[str, Any], request: int = -1) -> tuple[int, int, int]:
    """Restored from VRAM, DRAM and disk."""
    restored = facts["requests"][request]["restored_tokens"]
    return restored["vram"], restored["dram"], restored["ssd"]
