"""What C decodes of MXFP4 and NVFP4 are the bits that torch decodes."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.formats.coding import Coding
from penstock.runtime.formats.mxfp4 import Mxfp4
from penstock.runtime.formats.native import compiled as native
from penstock.runtime.formats.native.nibbles import decode_nibbles
from penstock.runtime.formats.nvfp4 import Nvfp4

ROWS, COLUMNS = 24, 640
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def mxfp4() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    scales = torch.arange(ROWS * COLUMNS // 32).remainder(256).to(torch.uint8).view(ROWS, -1)
    return {"blocks": torch.randint(0, 256, (ROWS, COLUMNS // 32, 16), dtype=torch.uint8, generator=draw), "scales": scales}


def nvfp4() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    scales = torch.arange(ROWS * COLUMNS // 16).remainder(256).to(torch.uint8).view(ROWS, -1).view(torch.float8_e4m3fn)
    codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8, generator=draw)
    return {"weight": codes, "weight_scale": scales, "factor": torch.tensor([3e-3])}


CASES: dict[str, tuple[Coding, dict[str, torch.Tensor]]] = {"MXFP4": (Mxfp4(), mxfp4()), "NVFP4": (Nvfp4(), nvfp4())}


def decoded(coding: Coding, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((ROWS, COLUMNS), 7, dtype=dtype)
    coding.decode(parts, out)
    return out


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_c_and_torch_decode_to_the_same_bits(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    got = decoded(*CASES[name], dtype)
    monkeypatch.setattr("penstock.runtime.formats.native.nibbles.compiled", lambda name: None)
    want = decoded(*CASES[name], dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num().view(torch.uint8), want.nan_to_num().view(torch.uint8)), "zeros keep their signs, too"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_every_size_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    """Scales from below the smallest number to above the largest: denormals, ties and overflow."""
    assert native.library_file().exists(), "this suite runs with the compiled library"
    scales = torch.arange(1 << 16, dtype=torch.int32).mul_(1 << 16).add_(0x9000).view(torch.float32)
    scales = torch.cat((scales, torch.arange(-30, 20).exp2() * 1.0009765625, torch.arange(-160.0, 130).exp2()))
    codes, values = torch.arange(256).to(torch.uint8)[17::2][:16].repeat(len(scales), 1), torch.arange(-8.0, 8.0)
    out = torch.empty(len(scales), 32, dtype=dtype)
    assert decode_nibbles(codes, values, scales, out)
    order = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    want = (values[order] * scales[:, None]).to(dtype)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out[~out.isnan()].view(torch.int16), want[~want.isnan()].view(torch.int16))


def test_the_narrow_way_decodes_what_the_wide_one_does() -> None:
    """Groups of 2 to 30 numbers leave what vectors do not take."""
    draw = torch.Generator().manual_seed(4)
    for group in (2, 6, 14, 18, 30, 46):
        codes = torch.randint(0, 256, (8, group * 4), dtype=torch.uint8, generator=draw)
        scales, values = torch.rand(8, 8, generator=draw).bfloat16(), torch.arange(-8.0, 8.0)
        out = torch.empty(8, group * 8, dtype=torch.bfloat16)
        assert decode_nibbles(codes, values, scales, out)
        order = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
        assert torch.equal(out, (values[order].view(8, 8, group) * scales.float()[..., None]).bfloat16().view_as(out))
