"""On a real card: what our kernels compute between products is what torch computes there, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from penstock.runtime.formats.kernels.on_card import layer_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

CARD = torch.device("cuda", 0)
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 333])
@pytest.mark.parametrize("columns", [64, 3584, 4096, 5120])
def test_a_norm_is_torchs(dtype: torch.dtype, tokens: int, columns: int) -> None:
    kernels = layer_kernels(CARD)
    assert kernels is not None
    torch.manual_seed(tokens)
    x, more = (torch.randn(1, tokens, columns, device=CARD).mul_(2).to(dtype) for _ in range(2))
    weight = torch.rand(columns, device=CARD).to(dtype)
    for other in (None, more):
        total = x if other is None else x + other
        wide = total.float()
        want = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
        exact, near = (kernels.norm(x, other, weight, 1e-5, exact=exact) for exact in (True, False))
        assert exact is not None and near is not None
        assert torch.equal(exact[0], total) and torch.equal(exact[1], want)
        assert torch.equal(near[0], total) and (near[1].float() - want.float()).abs().max() <= 2**-7 * want.float().abs().max()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gate_is_torchs_for_every_number(dtype: torch.dtype) -> None:
    kernels = layer_kernels(CARD)
    assert kernels is not None
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=CARD).view(dtype)
    every = every[every.isfinite()].contiguous()
    up = torch.randn(len(every), device=CARD).to(dtype)
    want = F.silu(every) * up
    made = kernels.gate(every, up)
    assert made is every and torch.equal(made, want)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 128), (5, 64), (1, 96), (2048, 128)])
def test_rotary_positions_are_torchs(dtype: torch.dtype, tokens: int, dim: int) -> None:
    kernels = layer_kernels(CARD)
    assert kernels is not None
    torch.manual_seed(tokens)
    heads = [torch.randn(1, tokens, count, dim, device=CARD).to(dtype).transpose(1, 2) for count in (6, 2)]
    angles = torch.randn(1, tokens, dim, device=CARD)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    made = kernels.rotate(*heads, cos, sin)
    assert made is not None
    for one, got in zip(heads, made, strict=True):
        low, high = one.chunk(2, dim=-1)
        assert torch.equal(got, one * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None])
