"""Which tensors are parts of a matrix in MXFP4 or NVFP4, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.given.formats import QUANTISED
from penstock.planner.contract.stored.scheme import SortedTensors, sort_tensors
from penstock.planner.contract.stored.schemes import scheme_of

Stored = tuple[int, tuple[int, ...], str]
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
LAYER = "model.layers.0"


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": {"num_bits": 4, **weights}}}}


def stored(dtype: str, *shape: int) -> Stored:
    nbytes = 4 if dtype == "F32" else 1
    for n in shape:
        nbytes *= n
    return nbytes, shape, dtype


def sort(said: dict[str, Any], tensors: dict[str, Stored]) -> SortedTensors:
    scheme = scheme_of(said, "tiny/config.json")
    assert scheme is not None
    return sort_tensors(tensors, scheme)


GPT_OSS = {
    f"{LAYER}.mlp.experts.gate_up_proj_blocks": stored("U8", 4, 96, 2, 16),
    f"{LAYER}.mlp.experts.gate_up_proj_scales": stored("U8", 4, 96, 2),
    f"{LAYER}.mlp.experts.gate_up_proj_bias": (768, (4, 96), "BF16"),
    f"{LAYER}.self_attn.sinks": (16, (8,), "BF16"),
}


def test_gpt_oss_stores_blocks_and_scales_of_all_experts() -> None:
    found = sort({"quant_method": "mxfp4"}, GPT_OSS)
    (matrix,) = found.matrices.values()
    assert (matrix.name, matrix.shape) == (f"{LAYER}.mlp.experts.gate_up_proj", (4, 96, 64))
    assert matrix.format is QUANTISED["MXFP4"] and matrix.nbytes == 4 * matrix.format.stored_bytes(96, 64)
    assert set(found.plain) == {f"{LAYER}.mlp.experts.gate_up_proj_bias", f"{LAYER}.self_attn.sinks"}


@pytest.mark.parametrize(
    ("said", "names", "factor"),
    [
        (MODELOPT, ("weight", "weight_scale", "weight_scale_2", "input_scale"), ()),
        (
            compressed("nvfp4-pack-quantized", group_size=16),
            ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
            (1,),
        ),
    ],
    ids=["ModelOpt", "compressed-tensors"],
)
def test_nvfp4_is_found_by_either_publishers_names(said: dict[str, Any], names: tuple[str, ...], factor: tuple[int, ...]) -> None:
    kinds = (stored("U8", 64, 16), stored("F8_E4M3", 64, 2), stored("F32", *factor), stored("F32", *factor))
    tensors = {f"{LAYER}.mlp.up_proj.{name}": kind for name, kind in zip(names, kinds, strict=True)}
    plain = {f"{LAYER}.mlp.gate.weight": (64, (2, 16), "BF16")}
    found = sort(said, tensors | plain)
    (matrix,) = found.matrices.values()
    assert (matrix.shape, matrix.nbytes, set(found.plain)) == ((64, 32), 64 * 18 + 4, set(plain))


def test_compressed_tensors_mxfp4_is_the_same_numbers_by_other_names() -> None:
    tensors = {f"{LAYER}.mlp.up_proj.weight_packed": stored("U8", 8, 32), f"{LAYER}.mlp.up_proj.weight_scale": stored("U8", 8, 2)}
    (matrix,) = sort(compressed("mxfp4-pack-quantized", group_size=32), tensors).matrices.values()
    assert (matrix.shape, set(matrix.leaves)) == ((8, 64), {"blocks", "scales"})


@pytest.mark.parametrize(
    ("said", "tensors", "words"),
    [
        ({"quant_method": "mxfp4"}, dict([*GPT_OSS.items()][:1]), "gate_up_proj_blocks has no scales beside it"),
        ({"quant_method": "mxfp4"}, dict([*GPT_OSS.items()][1:]), "gate_up_proj_scales has no blocks beside it"),
        ({"quant_method": "mxfp4"}, GPT_OSS | {f"{LAYER}.mlp.experts.gate_up_proj_scales": stored("U8", 4, 96, 3)}, "16 bytes a scale"),
        (
            MODELOPT,
            {"model.layers.0.a.weight": stored("U8", 8, 16), "model.layers.0.a.weight_scale": stored("F8_E4M3", 8, 2)},
            "no weight_scale_2",
        ),
        (
            MODELOPT,
            {
                "model.layers.0.a.weight": stored("U8", 8, 16),
                "model.layers.0.a.weight_scale": stored("F8_E4M3", 8, 1),
                "model.layers.0.a.weight_scale_2": stored("F32"),
            },
            r"needs F8_E4M3 of shape \[8, 2\]",
        ),
    ],
    ids=["no scales", "no blocks", "wrong scales", "no factor", "too few scales"],
)
def test_parts_that_do_not_fit_are_refused(said: dict[str, Any], tensors: dict[str, Stored], words: str) -> None:
    with pytest.raises(UserError, match=words):
        sort(said, tensors)


def test_other_groups_are_not_known() -> None:
    assert scheme_of(compressed("nvfp4-pack-quantized", group_size=32), "x") is None
    assert scheme_of(MODELOPT | {"quant_algo": "W4A8_AWQ"}, "x") is None
