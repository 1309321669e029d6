"""Several tokens behind others see those before them, whoever computes it, and torch is asked once whether FlashAttention can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock.runtime.kv.attention import behind_others
from penstock.runtime.kv.attention.behind_others import BehindOthers

TOKENS, KEYS = 3, 8
SEES = torch.ones(TOKENS, KEYS, dtype=torch.bool).tril(KEYS - TOKENS)


def drawn(dim: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(dim)
    return torch.randn(1, 4, TOKENS, dim), torch.randn(1, 2, KEYS, dim), torch.randn(1, 2, KEYS, dim)


def wanted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=SEES, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("dim", [8, 12, 16])
@pytest.mark.parametrize("usable", [True, False])
def test_each_token_sees_those_before_it(dim: int, usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, given = list[Any](), list[tuple[Any, ...]]()

    def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, scale: float) -> tuple[torch.Tensor, None]:
        given.append(more)
        return wanted(query, key, value, scale), None

    flash_attention = SimpleNamespace(_scaled_dot_product_flash_attention=SimpleNamespace(default=flash))
    monkeypatch.setattr(behind_others, "_usable", lambda *tensors: asked.append(tensors) or usable)
    monkeypatch.setattr(behind_others, "torch", SimpleNamespace(ops=SimpleNamespace(aten=flash_attention)))
    behind, tensors = BehindOthers(), drawn(dim)
    for _ in range(3):
        assert torch.allclose(behind.attend(*tensors, 0.3), wanted(*tensors, 0.3), atol=1e-6)
    even = dim % 8 == 0
    assert len(asked) == even and given == [(0.0, True, False)] * (3 if usable and even else 0)
    assert torch.allclose(BehindOthers().attend(*tensors, None), wanted(*tensors, None), atol=1e-6)
