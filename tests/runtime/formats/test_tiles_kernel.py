"""What the tensor cores' kernel gathers and adds up is the product; Triton's interpreter plays the card, and numpy its tiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penstock.runtime.formats.codings import CODINGS

LANES = 32
CASES = {
    "one": ((24,), 640, False, True),
    "few columns, zero points": ((16,), 128, True, False),
    "three": ((32, 16, 16), 256, False, False),
    "two, zero points": ((16, 32), 256, True, False),
}
"""Rows of each matrix, columns, whether zero points are stored, whether there is a bias."""


def halves(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two BF16 of each word."""
    bits = pairs.astype(np.uint32)
    return (bits << 16).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)


def tiles(given: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What the assembled text says that it computes, of all lanes: the sums of both rows, in each lane of a row."""
    x = [half for pairs in given[8:24] for half in halves(pairs)]
    assert (given[26].astype(np.int64) == np.arange(len(given[26])) % LANES).all()
    made = []
    for row, zero in ((given[:4], given[24]), (given[4:8], given[25])):
        low, high = halves(zero)
        assert (low == high).all() and (low <= -128).all()
        numbers = [(words.astype(np.uint32) >> (4 * k)) & 15 for words in row for k in range(8)]
        alone = sum((number + 128.0 + low) * value for number, value in zip(numbers, x, strict=True))
        made.append(np.repeat(alone.reshape(-1, 4).sum(1), 4).astype(np.float32))
    return made[0], made[1]


def play() -> None:
    """Have Triton's interpreter do so where a kernel has text of its own."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def played(text: Any, operands: Any, args: list[Any], dtype: Any, **_: Any) -> Any:
        if not isinstance(dtype, tuple):
            return args[0]
        made = tiles([np.asarray(one.handle.data) for one in args])
        return tuple(tl.tensor(TensorHandle(one, tl.float32), tl.block_type(tl.float32, list(one.shape))) for one in made)

    tl.inline_asm_elementwise = played


def compare() -> dict[str, float]:
    from penstock.runtime.formats.kernels.int4_triton import WholeKernels

    play()
    torch.manual_seed(0)
    kernels, found = WholeKernels(4, tiles=True), {}
    assert kernels.tiles is not None
    for name, (heights, columns, asymmetric, biased) in CASES.items():
        each = []
        for rows in heights:
            parts = {"weight_packed": torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32)}
            parts["weight_scale"] = (torch.rand(rows, columns // 128) * 0.01 + 0.001).bfloat16()
            if asymmetric:
                parts["weight_zero_point"] = torch.randint(-(2**31), 2**31 - 1, (rows // 8, columns // 128), dtype=torch.int32)
            each.append(parts)
        coding, plain = CODINGS["INT4-128-asym" if asymmetric else "INT4-128"], torch.empty(sum(heights), columns)
        for parts, out in zip(each, plain.split(heights), strict=True):
            coding.decode(parts, out)
        x, bias = torch.randn(1, columns).bfloat16(), torch.randn(sum(heights)).bfloat16() if biased else None
        matrices = [(parts["weight_packed"], parts["weight_scale"], parts.get("weight_zero_point")) for parts in each]
        made = kernels.tiles.joined(x, matrices) if len(each) > 1 else kernels.product(x, *matrices[0], bias, bits=4)
        want = F.linear(x.double(), plain.double(), None if bias is None else bias.double())
        found[name] = float("inf") if made is None else ((made.double() - want).abs().max() / want.abs().max()).item()
    alone = (torch.zeros(24, 16, dtype=torch.int32), torch.zeros(24, 1).bfloat16(), None)
    found["rows that are no tiles"] = float(kernels.tiles.joined(torch.zeros(1, 128).bfloat16(), [alone, alone]) is not None)
    return found


def test_one_token_by_tiles_is_the_product_with_what_is_decoded() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) == len(CASES) + 1 and all(error < 0.01 for error in found.values()), found


if __name__ == "__main__":
    print(json.dumps(compare()))
