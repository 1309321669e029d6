"""Quantised checkpoints as the planner counts them: a matrix and its scales as one tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.given.formats import GROUPS, KNOWN_FORMATS, QUANTISED, Format
from penstock.planner.contract.stored.scheme import Converted, Scheme, sort_tensors
from penstock.planner.contract.stored.schemes import scheme_of
from penstock.planner.contract.stored.stored_matrix import Leaf, StoredMatrix

_SHAPES: Mapping[str, Callable[[tuple[int, ...], Format], tuple[int, ...]]] = MappingProxyType(
    {
        "_blocks": lambda shape, _: (*shape[:-2], 2 * shape[-2] * shape[-1]),
        ".weight_packed": lambda shape, _: (*shape[:-1], shape[-1] * 8),
        ".qweight": lambda shape, form: (shape[1] * 8, shape[0]) if form.name.startswith("AWQ") else (shape[1], shape[0] * 8),
    }
)
"""Name of the packed elements -> the shape of the matrix that they are."""
_BESIDE = re.compile(
    r"(.+?)\.(weight_(?:packed|scale|scale_inv|scale_2|global_scale|zero_point|shape|g_idx)|input_(?:scale|global_scale)"
    r"|qweight|qzeros|scales|g_idx|SCB|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)|weight)"
)
_MXFP4 = re.compile(r"(.+)_(blocks|scales)")


@dataclass(frozen=True)
class Sizes:
    """A scheme whose sizes alone are known: no run reads it."""

    format: Format
    """Of every matrix that is converted."""
    converted: Converted = Converted()
    columns: int = 1
    """Of a matrix that is stored flat, as bitsandbytes does: the width of the layers' input."""

    def part(self, tensor: str) -> tuple[str, str] | None:
        found = (_MXFP4 if self.converted.experts_only else _BESIDE).fullmatch(tensor)
        if found is None:
            return None
        return (found[1] if self.converted.experts_only else f"{found[1]}.weight"), found[2]

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        main = next((leaf for leaf in leaves.values() if leaf.tensor == name or leaf.tensor.endswith(tuple(_SHAPES))), None)
        if main is None or main.dtype in KNOWN_FORMATS or (len(leaves) == 1 and main.tensor == name):
            return None
        shape = next((change(main.shape, self.format) for end, change in _SHAPES.items() if main.tensor.endswith(end)), main.shape)
        if self.format.name.startswith("NF4") and main.dtype == "U8":
            shape = (2 * main.shape[0] // self.columns, self.columns)
        return StoredMatrix(name, shape, self.format, leaves)

    def planned(self, name: str, shape: tuple[int, ...]) -> Format | None:
        return self.format if self.converted.holds(name, shape) else None


def quantise(tensors: Mapping[str, TensorInfo], by: Scheme | None) -> Mapping[str, TensorInfo]:
    """``tensors`` of an unquantised model as ``by`` would store them."""
    if by is None:
        return tensors
    planned = {name: by.planned(name, info.shape) for name, info in tensors.items()}
    return {name: info if (form := planned[name]) is None else TensorInfo.of(info.shape, form) for name, info in tensors.items()}


def as_matrices(tensors: Mapping[str, tuple[int, tuple[int, ...], str]], by: Scheme | None) -> Mapping[str, TensorInfo]:
    """A checkpoint's stored ``tensors``, each quantised matrix with its scales as one, its shape that of the matrix. UserError as
    :meth:`Scheme.matrix` says."""
    found = sort_tensors(tensors, by)
    plain = {name: TensorInfo(*stored) for name, stored in found.plain.items()}
    return plain | {name: TensorInfo(matrix.nbytes, matrix.shape, matrix.format.name) for name, matrix in found.matrices.items()}


def quantisation_of(config: Mapping[str, Any], where: str) -> Scheme | None:
    """What ``config`` (unwrapped) says; None for weights as they were trained. UserError names a method whose sizes are not known."""
    said = config.get("quantization_config")
    if not said:
        return None
    if isinstance(said, Mapping):
        found = scheme_of(said, where)
        if found is not None:
            return found
    form = _format_of(said) if isinstance(said, Mapping) else None
    if form is None or not isinstance(said, Mapping):
        method = str(said.get("quant_method", "unknown") if isinstance(said, Mapping) else said)[:40]
        raise UserError(
            f"{where}: the sizes of this quantization_config ({method!r}) are not known; known are fp8, mxfp4, and awq, gptq, "
            "compressed-tensors and bitsandbytes of 4 or 8 bits; use another quantisation of the model, or its BF16 checkpoint"
        )
    hidden = config.get("hidden_size")
    columns = hidden if type(hidden) is int and hidden > 0 else 1
    return Sizes(form, Converted.of(said, said.get("quant_method") == "mxfp4"), columns)


def _format_of(said: Mapping[str, Any]) -> Format | None:
    method, bits, group = said.get("quant_method"), said.get("bits", said.get("w_bit")), said.get("group_size", said.get("q_group_size"))
    if method == "mxfp4":
        return QUANTISED["MXFP4"]
    if method in ("awq", "gptq") and bits == 4 and group in GROUPS:
        return QUANTISED[f"{method.upper()}-{group}"]
    if method == "bitsandbytes" and said.get("load_in_4bit"):
        return QUANTISED["NF4-double" if said.get("bnb_4bit_use_double_quant") else "NF4"]
    if method == "bitsandbytes" and said.get("load_in_8bit"):
        return QUANTISED["INT8-row"]
    return _compressed(said) if method == "compressed-tensors" else None


def _compressed(said: Mapping[str, Any]) -> Format | None:
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    (one,) = groups.values()
    weights = one.get("weights") if isinstance(one, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    bits, kind, strategy, group = (weights.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
    if (bits, kind) == (4, "int") and group in GROUPS and weights.get("symmetric", True):
        return QUANTISED[f"INT4-{group}"]
    if (bits, kind, group) == (4, "float", 16):
        return QUANTISED["NVFP4"]
    return QUANTISED["INT8-row"] if (bits, kind, strategy) == (8, "int", "channel") else None
