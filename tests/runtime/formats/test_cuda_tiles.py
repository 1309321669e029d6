"""On a real card: one token's product by the tensor cores is the product with what is decoded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from penstock.runtime.formats.coding import JoinedCoding
from penstock.runtime.formats.codings import CODINGS
from penstock.runtime.formats.kernels.on_card import whole_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

CARD = torch.device("cuda", 0)


@pytest.mark.parametrize("rows, columns, group", [(200, 384, 128), (8208, 4096, 128), (64, 14336, 128), (16, 128, 128)])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_product_by_tiles_is_that_with_the_decoded_matrix(rows: int, columns: int, group: int, asymmetric: bool) -> None:
    torch.manual_seed(rows)
    groups, integers = columns // group, {"dtype": torch.int32, "device": CARD}
    parts = {"weight_packed": torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), **integers)}
    parts["weight_scale"] = (torch.rand(rows, groups, device=CARD) * 0.01 + 0.001).bfloat16()
    if asymmetric:
        parts["weight_zero_point"] = torch.randint(-(2**31), 2**31 - 1, (-(-rows // 8), groups), **integers)
    coding, plain = CODINGS[f"INT4-{group}-asym" if asymmetric else f"INT4-{group}"], torch.empty(rows, columns, device=CARD).bfloat16()
    coding.decode(parts, plain)
    for bias in (None, torch.randn(rows, device=CARD).bfloat16()):
        x = torch.randn(1, columns, device=CARD).bfloat16()
        want = F.linear(x.double(), plain.double(), None if bias is None else bias.double())
        made = coding.linear(x, parts, bias)
        assert made is not None and (made.double() - want).abs().max() <= 4e-3 * want.abs().max()


@pytest.mark.parametrize("heights", [(64, 16, 48), (112, 112)])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_matrices_below_each_other_give_what_each_gives(heights: tuple[int, ...], asymmetric: bool) -> None:
    torch.manual_seed(1)
    columns, integers, each = 512, {"dtype": torch.int32, "device": CARD}, []
    for rows in heights:
        parts = {"weight_packed": torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), **integers)}
        parts["weight_scale"] = (torch.rand(rows, 4, device=CARD) * 0.01 + 0.001).bfloat16()
        if asymmetric:
            parts["weight_zero_point"] = torch.randint(-(2**31), 2**31 - 1, (rows // 8, 4), **integers)
        each.append(parts)
    coding, x = CODINGS["INT4-128-asym" if asymmetric else "INT4-128"], torch.randn(1, columns, device=CARD).bfloat16()
    assert isinstance(coding, JoinedCoding)
    made, alone = coding.joined(x, each), [coding.linear(x, parts, None) for parts in each]
    assert made is not None and torch.equal(made, torch.cat([one for one in alone if one is not None], dim=-1))


def test_a_card_of_today_has_them() -> None:
    kernels = whole_kernels(CARD)
    assert kernels is not None and (kernels.tiles is not None) == (torch.cuda.get_device_capability(CARD) >= (8, 0))
