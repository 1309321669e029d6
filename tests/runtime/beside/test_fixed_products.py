"""AVX2 multiplies a few rows by whole numbers of 16 bits, and so does AVX512 that has BF16's products. Inputs are rounded by at most
2 ** -15 of their block's largest, weights not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from penstock.runtime.beside.host_ffn import HostFfn
from penstock.runtime.beside.host_library import Level, machine_level, products_unbuilt
from penstock.runtime.beside.host_matrix import HostMatrix, host_matrix_of
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.formats.codings import CODINGS
from tests.runtime.beside.coded_matrices import coded_matrices
from tests.runtime.beside.fixed_error import fixed_error

pytestmark = pytest.mark.skipif(products_unbuilt() is not None or machine_level() < Level.avx2, reason="no AVX2, or no compiler here")
SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
ONES = {"Q4_K": (slice(4, 12), slice(12, 16)), "Q5_K": (slice(4, 12), slice(12, 16)), "Q6_K": (slice(192, 208),)}
SIZES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "Q4_0": 18, "Q8_0": 34}


@pytest.fixture(params=[level for level in (Level.avx2, Level.avx512_bf16, Level.amx) if level <= machine_level()], scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[HostPool]:
    with HostPool(3, level=request.param) as made:
        yield made


def exact_matrices(rows: int, columns: int) -> Iterator[tuple[str, HostMatrix, torch.Tensor]]:
    """Name, matrix and weights that BF16 holds to the bit: scales are powers of two, a large block's are one."""
    for name, (form, parts) in coded_matrices(rows, columns).items():
        if form.startswith(("lossless", "FP8")):
            continue
        kept = dict(parts)
        if form in SIZES:
            blocks = kept["weight"].view(rows, -1, SIZES[form]).clone()
            for at in SCALES[form]:
                blocks[:, :, at : at + 2] = torch.tensor([0.0078125], dtype=torch.float16).view(torch.uint8)
            for place, number in zip(ONES.get(form, ()), (1, 0x11), strict=False):
                blocks[:, :, place] = number
            kept["weight"] = blocks.view(rows, -1)
        for leaf in ("weight_scale", "scales", "divisor", "factor"):
            if leaf in kept and kept[leaf].dtype != torch.uint8:
                powers = torch.ones_like(kept[leaf].float()) * 2.0 ** -(torch.arange(kept[leaf].numel()) % 4).view(kept[leaf].shape)
                kept[leaf] = powers.to(kept[leaf].dtype)
        plain, matrix = torch.empty(rows, columns, dtype=torch.bfloat16), host_matrix_of(form, kept)
        CODINGS[form].decode(kept, plain)
        assert matrix is not None
        yield name, matrix, plain


def inputs(rows: int, columns: int) -> Iterator[tuple[str, torch.Tensor]]:
    usual = torch.randn(rows, columns)
    yield "usual", usual
    yield "outliers", usual * torch.where(torch.rand(rows, columns) < 0.02, 1000.0, 1.0)
    yield "blocks apart", usual * 10.0 ** (torch.arange(columns) // 128 % 5 * 6 - 12).float()
    yield "mostly zeros", usual * (torch.arange(columns) % 200 == 3)
    yield "zeros", torch.zeros(rows, columns)
    yield "the smallest", usual * 2.0**-120
    yield "the largest", usual.sign() * 3e34
    yield "all sizes", usual * 2.0 ** torch.randint(-20, 20, (rows, columns)).float()


@pytest.mark.parametrize(("rows", "columns"), [(24, 768), (17, 352), (8, 2048), (5, 160)])
def test_a_product_is_off_by_no_more_than_its_inputs_rounding(pool: HostPool, rows: int, columns: int) -> None:
    torch.manual_seed(columns)
    for name, matrix, plain in exact_matrices(rows, columns):
        for tokens in (1, 2, 3, 4):
            for what, given in inputs(tokens, columns):
                x, out = given.bfloat16(), torch.empty(tokens, rows, dtype=torch.bfloat16)
                pool.product(matrix, x, out)
                exact, size = x.double() @ plain.double().T, x.double().abs() @ plain.double().abs().T
                smallest = plain.double().abs().sum(1) * 2.0**-127 + 2.0**-126  # half the least step, and numbers of F32 below the least
                bound = exact.abs() * 2**-8 + size * 2**-22 + fixed_error(x, plain) + smallest
                assert ((out.double() - exact).abs() <= bound).all(), (name, tokens, what)


@pytest.mark.parametrize(("rows", "columns"), [(24, 768), (17, 352)])
def test_so_is_one_of_f16(pool: HostPool, rows: int, columns: int) -> None:
    torch.manual_seed(columns)
    for name, matrix, plain in exact_matrices(rows, columns):
        for tokens in (1, 4, 7, 16):
            for what, given in list(inputs(tokens, columns))[:2]:
                x, out = given.half(), torch.empty(tokens, rows, dtype=torch.float16)
                pool.product(matrix, x, out)
                exact, size = x.double() @ plain.double().T, x.double().abs() @ plain.double().abs().T
                bound = exact.abs() * 2**-11 + size * 2**-22 + fixed_error(x, plain) + 2.0**-25
                assert ((out.double() - exact).abs() <= bound).where(exact.abs() < 65000, True).all(), (name, tokens, what)


@pytest.mark.parametrize("end", [torch.inf, -torch.inf, torch.nan])
def test_an_input_without_an_end_gives_what_decoding_gives(pool: HostPool, end: float) -> None:
    torch.manual_seed(4)
    for name, matrix, plain in exact_matrices(16, 512):
        for tokens in (1, 3):
            x, out = torch.randn(tokens, 512).bfloat16(), torch.empty(tokens, 16, dtype=torch.bfloat16)
            x[-1, 300] = end
            pool.product(matrix, x, out)
            want = x.float() @ plain.float().T
            assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.isposinf(), want.isposinf()), name
            assert torch.equal(out.isneginf(), want.isneginf()), name


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_middle_of_an_ffn_waits_for_whole_blocks(pool: HostPool, tokens: int) -> None:
    """Threads claim other columns of it than those that share a step."""
    torch.manual_seed(3)
    up = {name: (matrix, plain) for name, matrix, plain in exact_matrices(416, 352)}
    down = {name: (matrix, plain) for name, matrix, plain in exact_matrices(40, 416)}
    for name in ("INT4-32", "INT8-32 F16", "Q4_0", "Q8_0", "MXFP4", "NVFP4 True", "AWQ-32 torch.float16", "GPTQ4-32 torch.float16 True"):
        (first, w_up), (last, w_down) = up[name], down[name]
        x, out = (torch.randn(tokens, 352) / 64).bfloat16(), torch.empty(tokens, 40, dtype=torch.bfloat16)
        pool.ffn(HostFfn(first, first, last), x, out)
        made = x.double() @ w_up.double().T
        middle = functional.silu(made) * made
        want, size = middle @ w_down.double().T, middle.abs() @ w_down.double().abs().T
        assert (out.double() - want).abs().max() <= 0.02 * size.max(), name
