"""Blocks of GGUF files are decoded to the bits of the ``gguf`` package: by torch, in C, and in Triton as its interpreter runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from penstock.planner.contract.gguf.gguf_types import CODED
from penstock.planner.contract.given.formats import QUANTISED
from penstock.runtime.formats.codings import CODINGS
from penstock.runtime.formats.gguf import gguf_blocks
from penstock.runtime.formats.native import compiled as native
from penstock.runtime.model.interleaved import Interleaved
from tests.cli import ROOT

HALVES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the F16 numbers of a block lie."""
NUMBERS = {block.name: number for number, block in CODED.items()}


def blocks(name: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Any bytes, with scales that are numbers, some of them subnormal, negative or 0."""
    random, block = np.random.default_rng(seed), CODED[NUMBERS[name]]
    made = random.integers(0, 256, (rows * columns // block.columns, block.nbytes), np.uint8)
    for at in HALVES[name]:
        scales = (random.standard_normal(len(made)) * 10.0 ** random.integers(-7, 1, len(made))).astype(np.float16)
        made[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(made.reshape(rows, -1))


def reference(name: str, weight: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(weight.numpy(), gguf.GGMLQuantizationType(NUMBERS[name])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("compiler", [True, False], ids=["in C", "by torch"])
def test_decoded_are_the_packages_values(name: str, dtype: torch.dtype, compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiler:
        monkeypatch.setattr(gguf_blocks, "compiled_for", lambda *_: None)
        monkeypatch.setattr(gguf_blocks, "STRETCH", 1 << 12)
    elif dtype is torch.bfloat16:
        assert native.compiled("gguf_decode") is not None, "this suite runs with the compiled library"
    weight = blocks(name, 21, 768)
    out = torch.empty(21, 768, dtype=dtype)
    CODINGS[name].decode({"weight": weight}, out)
    assert torch.equal(out, reference(name, weight).to(dtype))


@pytest.mark.parametrize("name", HALVES)
def test_a_format_has_the_bytes_of_its_blocks(name: str) -> None:
    assert QUANTISED[name].stored_bytes(3, 1024) == blocks(name, 3, 1024).numel()


def test_rows_that_lie_in_turn_come_in_order() -> None:
    heads, half, columns = 3, 4, 256
    ordered = blocks("Q4_K", heads * 2 * half, columns)
    stored = ordered.view(heads, 2, half, -1).swapaxes(1, 2).reshape(ordered.shape)
    out, want = torch.empty(2, heads * 2 * half, columns)
    Interleaved(CODINGS["Q4_K"], heads).decode({"weight": stored}, out)
    CODINGS["Q4_K"].decode({"weight": ordered}, want)
    assert torch.equal(out, want)


def test_a_product_from_the_stored_form_has_its_rows_in_order() -> None:
    class Fused:
        def decode(self, parts: dict[str, torch.Tensor], out: torch.Tensor) -> None:
            raise AssertionError("not asked")

        def linear(self, x: torch.Tensor, parts: dict[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
            assert bias is None
            return x @ parts["weight"].T

    heads, half = 3, 4
    ordered, x, bias = torch.randn(heads * 2 * half, 8), torch.randn(5, 8), torch.randn(heads * 2 * half)
    stored = ordered.view(heads, 2, half, -1).swapaxes(1, 2).reshape(ordered.shape)
    made = Interleaved(Fused(), heads).linear(x, {"weight": stored}, bias)
    assert made is not None and torch.allclose(made, x @ ordered.T + bias, atol=1e-5)


_INTERPRETED = """
import torch, torch.nn.functional as F
from penstock.runtime.formats.kernels.gguf_triton import GgufKernels
from tests.runtime.formats.test_gguf_blocks import HALVES, blocks, reference
decode, multiply = GgufKernels().decode, GgufKernels().multiply
for name in HALVES:
    rows, columns = 37, 768 if name.endswith("K") else 352
    weight = blocks(name, rows, columns)
    want, got = reference(name, weight), torch.empty(rows, columns)
    decode(name, weight, got)
    assert torch.equal(got, want), name
    for tokens in (1, 3):
        x, bias = torch.randn(tokens, columns).half(), torch.randn(rows).half()
        made, exact = multiply(name, x, weight, bias), F.linear(x.float(), want.half().float(), bias.float())
        assert (made.float() - exact).abs().max() < 0.01 * exact.abs().max(), (name, tokens)
    assert multiply(name, torch.zeros(17, columns).half(), weight, None) is None
print("right")
"""


def test_triton_decodes_to_the_same_bits_and_multiplies_within_a_hundredth() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", _INTERPRETED], env=env, cwd=Path(ROOT), capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr
