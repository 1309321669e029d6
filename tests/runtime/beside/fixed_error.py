"""How far products by whole numbers of 16 bits may be from those of their inputs."""

from __future__ import annotations

import torch
from torch.nn import functional

BLOCK = 128


def fixed_error(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[rows of x, rows of weights]: half a step, 2 ** -15 of the largest of 128 inputs, for each of their weights."""
    more = -x.shape[1] % BLOCK
    steps = functional.pad(x.double().abs(), (0, more)).view(len(x), -1, BLOCK).amax(2) * 2**-15
    sizes = functional.pad(weights.double().abs(), (0, more)).view(len(weights), -1, BLOCK).sum(2)
    return steps @ sizes.T
