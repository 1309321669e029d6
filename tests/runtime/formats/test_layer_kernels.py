"""Norms and rotary positions by our kernels are torch's; Triton's interpreter plays the card."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch


def means_by_warps(squares: torch.Tensor) -> torch.Tensor:
    """Of rows [rows, columns], summed as H100s do it: each of 32 threads has four sums, of columns that lie side by side."""
    turns = squares.numpy().reshape(len(squares), -1, 32, 4)
    sums = np.zeros_like(turns[:, 0])
    for turn in range(turns.shape[1]):
        sums += turns[:, turn]
    threads = ((sums[..., 0] + sums[..., 1]) + sums[..., 2]) + sums[..., 3]
    while threads.shape[1] > 1:
        half = threads.shape[1] // 2
        threads = threads[:, :half] + threads[:, half:]
    return torch.from_numpy(threads * (np.float32(len(squares)) / np.float32(squares.numel())))


def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def compare() -> dict[str, bool]:
    """In F16: the interpreter rounds to BF16 in its own way."""
    from penstock.runtime.formats.kernels.layer_triton import LayerKernels

    torch.manual_seed(0)
    kernels, found = LayerKernels(), {}
    x, more, weight = torch.randn(1, 3, 320).half(), torch.randn(1, 3, 320).half(), torch.rand(320).half()
    for name, other in (("norm", None), ("sum and norm", more)):
        total = x if other is None else x + other
        wide = total.float()
        want = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).half()
        added, exact = kernels.norm(x, other, weight, 1e-5, exact=True)
        found[f"{name}, exact"] = torch.equal(added, total) and torch.equal(exact, want)
        added, near = kernels.norm(x, other, weight, 1e-5, exact=False)
        found[name] = torch.equal(added, total) and bool((near - want).abs().max() <= 2**-9 * want.abs().max())
    x, more, weight = torch.randn(1, 17, 384).half(), torch.randn(1, 17, 384).half(), torch.rand(384).half()
    for name, other in (("by warps", None), ("sum and norm by warps", more)):
        total = x if other is None else x + other
        wide, found[f"{name}, refused"] = total[0].float(), not kernels.norm_by_warps(x, other, weight, *pair(x), 1e-5)
        kernels.by_warps[384, torch.float16] = True  # a card's sums are of another order than this host's
        added, made = pair(x) if other is not None else (x, torch.empty_like(x))
        ran = kernels.norm_by_warps(x, other, weight, added, made, 1e-5)
        want = weight * (wide * torch.rsqrt(means_by_warps(wide * wide) + 1e-5)).half()
        found[name] = ran and torch.equal(added, total) and torch.equal(made[0], want)
        kernels.by_warps.clear()
        found[f"{name}, exact"] = torch.equal(kernels.norm(x, other, weight, 1e-5, exact=True)[1][0], weight * (
            wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        ).half())  # fmt: skip
    heads = [torch.randn(1, 3, count, 32).half().transpose(1, 2) for count in (4, 2)]
    cos, sin = torch.randn(1, 3, 32).half(), torch.randn(1, 3, 32).half()
    for name, made, one in zip(("queries", "keys"), kernels.rotate(*heads, cos, sin), heads, strict=True):
        low, high = one.chunk(2, dim=-1)
        found[name] = torch.equal(made, one * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None])
    refused = [kernels.norm(x.float(), None, weight.float(), 1e-5, exact=False), kernels.norm(x.mT, None, weight, 1e-5, exact=False)]
    refused += [kernels.gate(x.float(), x.float()), kernels.gate(x, x[:, :2]), kernels.rotate(*heads, cos.float(), sin)]
    return found | {"others are refused": all(one is None for one in refused)}


def test_kernels_between_products_give_torchs_bits() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) == 13 and all(found.values()), found


if __name__ == "__main__":
    print(json.dumps(compare()))
