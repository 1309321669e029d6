"""What rounding explains between two devices, and what it does not."""

from __future__ import annotations

import torch

from penstock.runtime.recorded.agreement import bf16_rounding, disagreement, relative_error


def test_rounding_is_explained_and_wrong_units_are_not() -> None:
    torch.manual_seed(0)
    want = torch.randn(3, 500)
    rounded = want * (1 + 2**-9 * torch.randn_like(want).clamp(-1, 1))
    assert disagreement(rounded, want, 4) is None
    said = disagreement(want.roll(1, 1), want, 4)
    assert said is not None and f"{bf16_rounding(4):.3g}" in said


def test_logits_of_nothing_disagree_with_nothing() -> None:
    none = torch.zeros(1, 5)
    assert relative_error(none, none) == 0.0 and disagreement(none, none, 2) is None
    assert disagreement(none, torch.full((1, 5), float("nan")), 2) is None
    assert disagreement(torch.full((1, 5), float("nan")), torch.ones(1, 5), 2) is not None
