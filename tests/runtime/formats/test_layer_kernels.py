"""Norms and rotary positions by our kernels are torch's; Triton's interpreter plays the card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch


def means_in_order(squares: torch.Tensor, lanes: int) -> torch.Tensor:
    """Of rows [rows, columns], summed as H100s do it: each of ``lanes`` threads has four sums, of columns that lie side by side."""
    turns = squares.numpy().reshape(len(squares), -1, lanes, 4)
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


def in_order(kernels: Any) -> dict[str, bool]:
    """Norms that one kernel sums in the order of an H100's torch; where this host's is another, torch sums."""
    found = {}
    for rows, columns, lanes in ((17, 384, 32), (16, 128, 32), (9, 512, 64), (3, 2048, 256), (1, 4096, 512)):
        x, more, weight = torch.randn(1, rows, columns).half(), torch.randn(1, rows, columns).half(), torch.rand(columns).half()
        for name, other in ((f"{rows} rows", None), (f"sum of {rows} rows", more)):
            total, (added, made) = x if other is None else x + other, pair(x) if other is not None else (x, torch.empty_like(x))
            wide = total[0].float()
            card_s, host_s = (
                torch.rsqrt(mean + 1e-5) for mean in (means_in_order(wide * wide, lanes), (wide * wide).mean(-1, keepdim=True))
            )
            zeros = torch.zeros_like(x)  # whose factors are the same in every order
            found[f"{name}, held to torch"] = not kernels.norm_in_order(zeros, other, weight, added, made, 1e-5)
            kernels.in_order[columns, lanes, torch.float16] = True
            ran = kernels.norm_in_order(x, other, weight, added, made, 1e-5)
            found[name] = ran and torch.equal(added, total) and torch.equal(made[0], weight * (wide * card_s).half())
            kernels.in_order.clear()
            exact = kernels.norm(x, other, weight, 1e-5, exact=True)[1]
            found[f"{name}, exact"] = torch.equal(exact[0], weight * (wide * host_s).half())
    return found


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
    found |= in_order(kernels)
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
    assert len(found) == 37 and all(found.values()), found


if __name__ == "__main__":
    print(json.dumps(compare()))
