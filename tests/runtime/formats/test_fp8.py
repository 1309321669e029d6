"""FP8 is decoded to the bits that transformers gives."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.formats.codings import CODINGS


def parts(rows: int, columns: int, scales: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(rows * columns)
    weight = torch.randn(rows, columns, generator=made).mul_(40).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": torch.rand(scales, generator=made).add_(0.1).to(dtype)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "rows", "columns", "scales"),
    [
        ("FP8", 256, 384, (2, 3)),
        ("FP8", 128, 128, (1, 1)),
        ("FP8-row", 96, 40, (96, 1)),
        ("FP8-row", 96, 40, (96,)),
        ("FP8-tensor", 64, 48, ()),
        ("FP8-tensor", 64, 48, (1,)),
    ],
)
def test_decoding_gives_what_transformers_gives(
    name: str, rows: int, columns: int, scales: tuple[int, ...], scale: torch.dtype, dtype: torch.dtype
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored, out = parts(rows, columns, scales, scale), torch.empty(rows, columns, dtype=dtype)
    CODINGS[name].decode(stored, out)
    grid = stored["weight_scale"].reshape(scales if name == "FP8" else (-1, 1))
    assert torch.equal(out, Fp8Dequantize(None)._dequantize_one(stored["weight"], grid, dtype))


@pytest.mark.parametrize(("rows", "columns"), [(192, 130), (576, 128), (1, 7), (129, 257)])
def test_the_last_blocks_of_a_matrix_may_be_smaller(rows: int, columns: int) -> None:
    """transformers takes whole blocks alone: here each element is found by its own block."""
    grid = (-(-rows // 128), -(-columns // 128))
    stored, out = parts(rows, columns, grid), torch.empty(rows, columns)
    CODINGS["FP8"].decode(stored, out)
    down, right = torch.arange(rows) // 128, torch.arange(columns) // 128
    assert torch.equal(out, stored["weight"].float() * stored["weight_scale"][down[:, None], right[None]])
