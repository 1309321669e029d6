"""How far two ways to compute the same step may be apart: what BF16 rounding explains, and no more."""

from __future__ import annotations

import math

import torch

BF16_STEP = 2.0**-8
"""Relative distance between neighbouring BF16 numbers."""


def bf16_rounding(layers: int) -> float:
    """How far two ways to compute a model's logits are apart: each errs by one step at each of a layer's two residual additions, at the
    last norm and at the logits. Errors add up like a random walk, and those of both ways have nothing to do with each other.

        sqrt(2) * step * sqrt(2 * layers + 2)

    24 layers of 70B geometry with random weights, FFNs of 20 of them on the CPU beside two H100s: 0.029; this says 0.039. One, four and
    sixteen layers in Q4_K of random weights on a CPU: 0.0104, 0.0170 and 0.028; this says 0.0110, 0.0175 and 0.032.
    """
    return 2 * BF16_STEP * math.sqrt(layers + 1)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The Euclidean length of the difference over that of ``want``; 0 where neither has any."""
    difference, length = (got.float() - want.float()).norm().item(), want.float().norm().item()
    return difference / length if length else difference


def beyond_rounding(got: torch.Tensor, want: torch.Tensor, layers: int) -> str | None:
    """How far ``got`` is off ``want``, which so many layers made, and what is allowed; None where rounding explains that, or where ``want``
    are no numbers themselves."""
    if not bool(torch.isfinite(want).all()):
        return None
    error, allowed = relative_error(got, want), bf16_rounding(layers)
    return None if error <= allowed else f"{error:.3g} off, where rounding explains {allowed:.3g}"


def disagreement(got: torch.Tensor, want: torch.Tensor, layers: int) -> str | None:
    """Why logits of units that the CPU computed cannot be those of the card; None where they can."""
    off = beyond_rounding(got, want, layers)
    return None if off is None else f"what the CPU computes beside the card is {off}: all units are copied to the card"
