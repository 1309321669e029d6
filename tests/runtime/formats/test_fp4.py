"""MXFP4 and NVFP4 decode to the bits of their references; their kernels, which Triton's interpreter plays, to the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from penstock.runtime.formats.coding import Coding
from penstock.runtime.formats.e2m1 import VALUES
from penstock.runtime.formats.kernels.e2m1_matrix import E2m1Matrix
from penstock.runtime.formats.mxfp4 import Mxfp4
from penstock.runtime.formats.nvfp4 import Nvfp4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS, COLUMNS = 19, 640


def mxfp4(rows: int, columns: int, scales: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """A random matrix, its scales near those of trained weights."""
    blocks = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8)
    return {"blocks": blocks, "scales": torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8) if scales is None else scales}


def nvfp4(rows: int, columns: int, **factor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A random matrix with ``factor``."""
    scale = (torch.rand(rows, columns // 16) * 448).to(torch.float8_e4m3fn)
    return {"weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8), "weight_scale": scale, **factor}


def decoded(coding: Coding, parts: Mapping[str, torch.Tensor], rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(rows, columns, dtype=dtype)
    coding.decode(parts, out)
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4_decodes_as_transformers_dequantizes(dtype: torch.dtype) -> None:
    """All scales that are numbers, and all codes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    scales = torch.arange(255, dtype=torch.uint8).repeat(32).view(255, 32)
    parts = mxfp4(255, 1024, scales)
    want = convert_moe_packed_tensors(parts["blocks"][None], scales[None], dtype=dtype)[0].T
    assert torch.equal(bits(decoded(Mxfp4(), parts, 255, 1024, dtype)), bits(want))


def test_a_scale_of_255_is_not_a_number() -> None:
    assert decoded(Mxfp4(), mxfp4(1, 32, torch.tensor([[255]], dtype=torch.uint8)), 1, 32, torch.bfloat16).isnan().all()


def test_nvfp4_decodes_as_compressed_tensors_does() -> None:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    kind = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    parts = nvfp4(ROWS, COLUMNS, divisor=torch.tensor([1234.567]))
    state = {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"], "weight_global_scale": parts["divisor"]}
    want = NVFP4PackedCompressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=kind))["weight"]
    assert torch.equal(bits(decoded(Nvfp4(), parts, ROWS, COLUMNS, torch.bfloat16)), bits(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4_of_modelopt_is_number_times_scale_times_factor(dtype: torch.dtype) -> None:
    """Two matrices joined by their rows, each with a factor of its own."""
    torch.manual_seed(1)
    parts = nvfp4(20, COLUMNS, factor=torch.tensor([0.0123, 3.7]))
    codes = torch.stack([parts["weight"] & 15, parts["weight"] >> 4], dim=-1).view(20, -1, 16).int()
    factors = parts["factor"].repeat_interleave(10)[:, None]
    want = (torch.tensor(VALUES)[codes] * (parts["weight_scale"].float() * factors)[..., None]).view(20, -1)
    assert torch.equal(bits(decoded(Nvfp4(), parts, 20, COLUMNS, dtype)), bits(want.to(dtype)))


def test_kernels_compute_what_the_cpu_decodes() -> None:
    """Decoding bit for bit, products of 1, 3 and 16 rows, and of several experts in their slots. Triton reads its mode when it is
    imported."""
    pytest.importorskip("triton", reason="needs Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert all(case["same"] for case in found["matrices"]) and all(max(case["errors"]) < 1e-3 for case in found["matrices"]), found
    assert max(found["experts"]) < 8e-3 and found["gate"] < 1e-6, found


def relative(made: torch.Tensor, want: torch.Tensor) -> float:
    return ((made.float() - want).abs().max() / want.abs().max()).item()


def matrices() -> list[dict]:
    """In F16: the interpreter has no products of BF16, and rounds to it in its own way."""
    from penstock.runtime.formats.kernels.e2m1_triton import E2m1Kernels

    kernels, found = E2m1Kernels(), []
    for rows, columns in ((40, 96), (ROWS, COLUMNS)):
        divided, times = nvfp4(rows, columns, divisor=torch.tensor([1234.567])), nvfp4(rows, columns, factor=torch.tensor(0.0123))
        for coding, parts in ((Mxfp4(), mxfp4(rows, columns)), (Nvfp4(), divided), (Nvfp4(), times)):
            matrix, out = coding.on_card(parts, torch.randn(rows).half()), torch.empty(rows, columns).half()
            kernels.decode(matrix, out)
            want, errors = decoded(coding, parts, rows, columns, torch.float16), []
            for tokens in (1, 3, 16):
                x = torch.randn(tokens, columns).half() / 256
                made = kernels.linear(x, matrix)
                assert made is not None
                errors.append(relative(made, F.linear(x.float(), want.float(), matrix.bias.float())))
            assert kernels.linear(torch.randn(17, columns).half(), matrix) is None
            found.append({"same": torch.equal(bits(out), bits(want)), "errors": errors})
    return found


def experts() -> list[float]:
    """Experts in slots of one block, in BF16: nine of them, which take two launches."""
    from penstock.runtime.formats.kernels.e2m1_triton import E2m1Kernels

    slots, rows, columns, given, errors = torch.randint(0, 256, (12, 8192), dtype=torch.uint8), 48, 96, [], []
    for slot in (3, 0, 5, 7, 11, 2, 1, 9, 8):
        codes, scales, bias = (slots[slot, at : at + n] for at, n in ((0, 2304), (2304, 144), (4096, 96)))
        scales.random_(100, 130)
        bias.view(torch.bfloat16).copy_(torch.randn(rows))
        given.append(E2m1Matrix(codes.view(rows, 3, 16), scales.view(rows, 3), bias=bias.view(torch.bfloat16)))
    for tokens in (1, len(given)):
        x = torch.randn(tokens, columns).bfloat16()
        made = E2m1Kernels().experts(x, given)
        for number, matrix in enumerate(given):
            weight = decoded(Mxfp4(), {"blocks": matrix.codes, "scales": matrix.scales}, rows, columns, torch.float32)
            errors.append(relative(made[number], F.linear(x[number if tokens > 1 else 0].float(), weight, matrix.bias.float())))
        table = torch.tensor([(matrix.begin - given[2].begin) // 256 for matrix in given])
        errors.append(float(not torch.equal(E2m1Kernels().tabled(x, given[2], table), made)))
    return errors


def gate() -> float:
    """gpt-oss's, beside the model's own."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    from penstock.runtime.formats.kernels.gate_triton import ClampedGate

    both, module = torch.randn(3, 2 * 1100) * 5, SimpleNamespace(alpha=1.702, limit=7.0)
    return relative(ClampedGate(module.alpha, module.limit)(both), GptOssExperts._apply_gate(module, both))


if __name__ == "__main__":
    torch.manual_seed(2)
    print(json.dumps({"matrices": matrices(), "experts": experts(), "gate": gate()}))
