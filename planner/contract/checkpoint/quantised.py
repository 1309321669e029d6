"""Quantised checkpoints as the planner counts them: a matrix and its scales as one tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.given.formats import KNOWN_FORMATS, QUANTISED, Format
from penstock.planner.contract.stored.scheme import Converted, Scheme, sort_tensors
from penstock.planner.contract.stored.schemes import scheme_of
from penstock.planner.contract.stored.stored_matrix import Leaf, StoredMatrix

_BESIDE = re.compile(r"(.+?)\.(SCB|weight_format|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)|weight)")


@dataclass(frozen=True)
class Sizes:
    """A scheme whose sizes alone are known: no run reads it."""

    format: Format
    """Of every matrix that is converted."""
    converted: Converted = Converted()
    columns: int = 1
    """Of a matrix that is stored flat, as bitsandbytes does: the width of the layers' input."""

    def part(self, tensor: str) -> tuple[str, str] | None:
        found = _BESIDE.fullmatch(tensor)
        return None if found is None else (f"{found[1]}.weight", found[2])

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        main = leaves.get("weight")
        if main is None or main.dtype in KNOWN_FORMATS or len(leaves) == 1:
            return None
        flat = self.format.name.startswith("NF4") and main.dtype == "U8"
        shape = (2 * main.shape[0] // self.columns, self.columns) if flat else main.shape
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
    return Sizes(form, Converted.of(said), columns)


def _format_of(said: Mapping[str, Any]) -> Format | None:
    if said.get("quant_method") != "bitsandbytes":
        return None
    if said.get("load_in_4bit"):
        return QUANTISED["NF4-double" if said.get("bnb_4bit_use_double_quant") else "NF4"]
    return QUANTISED["LLM.int8"] if said.get("load_in_8bit") else None
