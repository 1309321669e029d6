"""Room that torch takes as a CUDA graph begins: asked for beforehand, for it cannot do without."""

from __future__ import annotations

import torch

_NUMBERS = 2
"""The seed and the offset of random numbers, which torch keeps on the card while any graph lives."""


def ask_for_room(device: torch.device) -> None:
    """Take what the next graph on the current stream will take of ``device`` before its first kernel, and give it back to torch's
    allocator. OutOfMemoryError where there is no room, as from the graph; but a graph that found none ends the process when it is dropped:
    torch 2.11 takes it for registered then ("The graph should be registered to the state")."""
    taken = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(_NUMBERS)]
    del taken
