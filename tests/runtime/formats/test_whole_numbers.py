"""Whole numbers are decoded to the bits that the tools decode them to: compressed-tensors itself, the others in a file that they made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.runtime.formats.codings import CODINGS

PUBLISHED = Path(__file__).parent / "golden" / "published.safetensors"
"""Made by ``bench/golden_formats.py``."""
ROWS, COLUMNS = 72, 384


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("bits", [4, 8])
def test_decoding_gives_what_compressed_tensors_gives(bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> None:
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(bits + group)
    weight = torch.randn(ROWS, COLUMNS).to(dtype)
    strategy = "group" if group else "channel"
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=group or None)
    grid = weight.view(ROWS, -1, group or COLUMNS)
    scale, zero = calculate_qparams(grid.amin(-1), grid.amax(-1), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero.to(torch.int8)}
    for tool in (PackedQuantizationCompressor, IntQuantizationCompressor)[: bits // 4]:
        stored = tool.compress(state, scheme)
        parts = {leaf: tensor for leaf, tensor in stored.items() if leaf != "weight_shape"}
        wanted = tool.decompress(stored, scheme)["weight"]
        for into in {dtype, torch.bfloat16}:
            out = torch.empty(ROWS, COLUMNS, dtype=into)
            CODINGS[f"INT{bits}-{group or 'row'}{'' if symmetric else '-asym'}"].decode(parts, out)
            assert torch.equal(out, wanted.to(into))


def test_columns_may_name_their_groups() -> None:
    """As llm-compressor stores ``actorder: group``; -1 throughout says that groups follow each other."""
    torch.manual_seed(0)
    parts = {"weight_packed": torch.randint(-(2**31), 2**31 - 1, (16, 16), dtype=torch.int32), "weight_scale": torch.rand(16, 4)}
    order = torch.randperm(128) // 32
    plain, out = torch.empty(16, 128), torch.empty(16, 128)
    CODINGS["INT4-32"].decode(parts, plain)
    CODINGS["INT4-32"].decode(parts | {"weight_g_idx": torch.full((128,), -1, dtype=torch.int32)}, out)
    assert torch.equal(out, plain)
    CODINGS["INT4-32"].decode(parts | {"weight_g_idx": order.to(torch.int32)}, out)
    numbers = plain / parts["weight_scale"].repeat_interleave(32, 1)
    assert torch.allclose(out, numbers * parts["weight_scale"][:, order], rtol=1e-6)


@pytest.mark.parametrize("into", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("made", "name"),
    [
        ("gptq-4-128", "GPTQ4-128"),
        ("gptq-4-64-desc_act", "GPTQ4-64-order"),
        ("gptq-8-row-sym", "GPTQ8-row"),
        ("auto_round-4-32", "GPTQ4-32"),
        ("awq-4-64", "AWQ-64"),
    ],
)
def test_decoding_gives_what_the_published_tools_give(made: str, name: str, into: torch.dtype) -> None:
    found = load_file(PUBLISHED)
    parts = {key.removeprefix(f"{made}."): tensor for key, tensor in found.items() if key.startswith(f"{made}.")}
    wanted = parts.pop("decoded")
    if not name.startswith("AWQ"):
        parts["qzeros_less_one"] = parts.pop("qzeros")
    if not name.endswith("-order"):
        parts.pop("g_idx", None)
    out = torch.empty(wanted.shape, dtype=into)
    CODINGS[name].decode(parts, out)
    assert torch.equal(out, wanted.to(into))


def test_zero_points_of_gptqs_second_version_are_stored_as_they_are() -> None:
    found = load_file(PUBLISHED)
    parts = {leaf: found[f"gptq-4-128.{leaf}"] for leaf in ("qweight", "scales")}
    zeros, first, second = found["gptq-4-128.qzeros"], torch.empty(64, 256), torch.empty(64, 256)
    CODINGS["GPTQ4-128"].decode(parts | {"qzeros": zeros}, first)
    CODINGS["GPTQ4-128"].decode(parts | {"qzeros_less_one": zeros}, second)
    scale = parts["scales"].float().t().repeat_interleave(128, 1)
    assert torch.allclose(first - second, scale, atol=1e-3)


def test_a_zero_point_of_none_is_stored_as_the_largest_number() -> None:
    parts = {"qweight": torch.zeros(1, 8, dtype=torch.int32), "scales": torch.ones(1, 8)}
    out = torch.empty(8, 8)
    CODINGS["GPTQ4-row"].decode(parts | {"qzeros_less_one": torch.full((1, 1), -1, dtype=torch.int32)}, out)
    assert not out.any()


def test_long_matrices_are_decoded_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.runtime.formats.whole_numbers as whole_numbers

    torch.manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (2, 128, 40), dtype=torch.int32)
    cases = {
        "INT4-32-asym": {"weight_packed": words[0], "weight_scale": torch.rand(128, 10), "weight_zero_point": words[1, :16, :10]},
        "GPTQ4-32": {"qweight": words[0, :40].repeat(1, 2), "scales": torch.rand(10, 80), "qzeros": words[1, :10, :10]},
        "AWQ-64": {"qweight": words[0, :, :10], "scales": torch.rand(2, 80), "qzeros": words[1, :2, :10]},
    }
    shapes = {"INT4-32-asym": (128, 320), "GPTQ4-32": (80, 320), "AWQ-64": (80, 128)}
    for name, parts in cases.items():
        whole, stretched = torch.empty(shapes[name]), torch.empty(shapes[name])
        CODINGS[name].decode(parts, whole)
        with monkeypatch.context() as patched:
            patched.setattr(whole_numbers, "STRETCH", 1)
            CODINGS[name].decode(parts, stretched)
        assert torch.equal(whole, stretched)


def parts_of_any_scale(dtype: torch.dtype) -> dict[str, dict[str, torch.Tensor]]:
    """Name of a format -> parts of a matrix [40, 2304], whose scales are any bits, infinite and NaN among them."""
    rows, columns, groups = 40, 2304, 18

    def words(down: int, across: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, (down, across), dtype=torch.int32)

    def scales(down: int, across: int) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15 - 1, (down, across * dtype.itemsize // 2), dtype=torch.int16).view(dtype)

    order = torch.randint(-2, groups + 2, (columns,), dtype=torch.int32)
    return {
        "INT4-128": {"weight_packed": words(rows, columns // 8), "weight_scale": scales(rows, groups)},
        "INT4-128-asym": {
            "weight_packed": words(rows, columns // 8),
            "weight_scale": scales(rows, groups),
            "weight_zero_point": words(rows // 8, groups),
            "weight_g_idx": order,
        },
        "INT8-row-asym": {
            "weight": words(rows, columns // 4).view(torch.int8),
            "weight_scale": scales(rows, 1),
            "weight_zero_point": words(rows, 1).to(torch.int8),
        },
        "GPTQ8-128-order": {
            "qweight": words(columns // 4, rows),
            "scales": scales(groups, rows),
            "qzeros_less_one": words(groups, rows // 4),
            "g_idx": order,
        },
        "GPTQ4-128": {"qweight": words(columns // 8, rows), "scales": scales(groups, rows), "qzeros": words(groups, rows // 8)},
        "AWQ-128": {"qweight": words(columns, rows // 8), "scales": scales(groups, rows), "qzeros": words(groups, rows // 8)},
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_decoding_in_c_gives_what_torch_gives(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    from penstock.runtime.formats import awq, gptq, pack_quantized

    torch.manual_seed(dtype.itemsize)
    for name, parts in parts_of_any_scale(dtype).items():
        for into in (torch.bfloat16, torch.float16):
            by_c, by_torch = (torch.empty(40, 2304, dtype=into) for _ in range(2))
            CODINGS[name].decode(parts, by_c)
            with monkeypatch.context() as patched:
                for module in (awq, gptq, pack_quantized):
                    patched.setattr(module, "decode_compiled", lambda *_, **__: False)
                CODINGS[name].decode(parts, by_torch)
            same = (by_c.view(torch.int16) == by_torch.view(torch.int16)) | (by_c.isnan() & by_torch.isnan())
            assert same.all(), (name, into)
