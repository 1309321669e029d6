"""Quantised checkpoints: what a quantization_config means for a matrix, and a matrix and its scales counted as one tensor."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.given.formats import GROUPS, KNOWN_FORMATS, QUANTISED, Format

EXCLUDING = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules")
"""Keys of quantization_config that list what stays as it was."""

_ROUTERS = re.compile(r"(?:^|\.)(?:gate|router|shared_expert_gate)$")
_OUTER = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)")
_SHAPES: Mapping[str, Callable[[tuple[int, ...], Format], tuple[int, ...]]] = MappingProxyType(
    {
        "_blocks": lambda shape, _: (*shape[:-2], 2 * shape[-2] * shape[-1]),
        ".weight_packed": lambda shape, _: (*shape[:-1], shape[-1] * 8),
        ".qweight": lambda shape, form: (shape[1] * 8, shape[0]) if form.name.startswith("AWQ") else (shape[1], shape[0] * 8),
    }
)
"""Name of the packed elements -> the shape of the matrix that they are."""
_BESIDE = re.compile(
    r"(.+?)(?:\.weight_(?:packed|scale|scale_inv|scale_2|global_scale|zero_point|shape|g_idx)|\.input_(?:scale|global_scale)"
    r"|\.(?:qweight|qzeros|scales|g_idx|SCB)|\.weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+))"
)
_MXFP4 = re.compile(r"(.+)_(?:blocks|scales)")


@dataclass(frozen=True)
class Quantisation:
    """What a quantization_config says."""

    format: Format
    """Of every matrix that is converted."""
    excluded: tuple[str, ...] = ()
    """Modules that stay as they were: names or ends of names, ``*`` for any, or ``re:`` and an expression."""
    experts_only: bool = False
    columns: int = 1
    """Of a matrix that is stored flat, as bitsandbytes does: the width of the layers' input."""

    def converts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the tensor ``name`` of a decoder is converted: the layers' matrices, routers and what is excluded apart."""
        module, expert = name.removesuffix(".weight"), ".experts." in name and len(shape) == 3
        matrix = expert or (name.endswith(".weight") and len(shape) == 2 and not self.experts_only)
        return matrix and ".layers." in f".{name}" and not _ROUTERS.search(module) and not self._excludes.search(_OUTER.sub("", module))

    @cached_property
    def _excludes(self) -> re.Pattern[str]:
        texts = [text[3:] if text.startswith("re:") else _glob(_OUTER.sub("", text)) for text in self.excluded]
        return re.compile("|".join(rf"(?:^|\.)(?:{text})(?:\.|$)" for text in texts) or r"(?!)")


def quantise(tensors: Mapping[str, TensorInfo], by: Quantisation | None) -> Mapping[str, TensorInfo]:
    """``tensors`` of an unquantised model as ``by`` would store them."""
    if by is None:
        return tensors
    return {name: TensorInfo.of(info.shape, by.format) if by.converts(name, info.shape) else info for name, info in tensors.items()}


def as_matrices(tensors: Mapping[str, tuple[int, tuple[int, ...], str]], by: Quantisation | None) -> Mapping[str, TensorInfo]:
    """A checkpoint's stored ``tensors``, each quantised matrix with its scales as one, its shape that of the matrix."""
    if by is None:
        return {name: TensorInfo(*stored) for name, stored in tensors.items()}
    groups: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, stored in tensors.items():
        base = _MXFP4.fullmatch(name) if by.experts_only else _BESIDE.fullmatch(name)
        logical = name if base is None else base[1] if by.experts_only else f"{base[1]}.weight"
        groups[logical][name] = TensorInfo(*stored)
    return {name: _one(name, group, by) for name, group in groups.items()}


def _one(name: str, group: Mapping[str, TensorInfo], by: Quantisation) -> TensorInfo:
    main = next((part for part in group if part == name or part.endswith(tuple(_SHAPES))), "")
    if not main or (len(group) == 1 and group[main].dtype in KNOWN_FORMATS):
        (*_, alone) = group.values()
        return alone
    shape = next((change(group[main].shape, by.format) for end, change in _SHAPES.items() if main.endswith(end)), group[main].shape)
    if by.format.name.startswith("NF4") and group[main].dtype == "U8":
        shape = (2 * group[main].shape[0] // by.columns, by.columns)
    plain = group[main].dtype in KNOWN_FORMATS
    return TensorInfo(sum(part.nbytes for part in group.values()), shape, group[main].dtype if plain else by.format.name)


def quantisation_of(config: Mapping[str, Any], where: str) -> Quantisation | None:
    """What ``config`` (unwrapped) says; None for weights as they were trained. UserError names a method whose sizes are not known."""
    said = config.get("quantization_config")
    if not said:
        return None
    form = _format_of(said) if isinstance(said, Mapping) else None
    if form is None or not isinstance(said, Mapping):
        method = str(said.get("quant_method", "unknown") if isinstance(said, Mapping) else said)[:40]
        raise UserError(
            f"{where}: the sizes of this quantization_config ({method!r}) are not known; known are fp8, mxfp4, and awq, gptq, "
            "compressed-tensors and bitsandbytes of 4 or 8 bits; use another quantisation of the model, or its BF16 checkpoint"
        )
    listed: list[Any] = next((said[key] for key in EXCLUDING if isinstance(said.get(key), list)), [])
    hidden = config.get("hidden_size")
    columns = hidden if type(hidden) is int and hidden > 0 else 1
    return Quantisation(form, tuple(str(text) for text in listed), said.get("quant_method") == "mxfp4", columns)


def _format_of(said: Mapping[str, Any]) -> Format | None:
    method, bits, group = said.get("quant_method"), said.get("bits", said.get("w_bit")), said.get("group_size", said.get("q_group_size"))
    if method == "mxfp4":
        return QUANTISED["MXFP4"]
    if method == "fp8":
        return QUANTISED.get({"[128, 128]": "FP8", "None": "FP8-tensor"}.get(str(said.get("weight_block_size")), ""))
    if method == "fbgemm_fp8":
        return QUANTISED["FP8-row"]
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
    if (bits, kind) == (8, "float"):
        return QUANTISED.get({"block": "FP8", "channel": "FP8-row", "tensor": "FP8-tensor"}.get(str(strategy), ""))
    return QUANTISED["INT8-row"] if (bits, kind, strategy) == (8, "int", "channel") else None


def _glob(text: str) -> str:
    return re.escape(text).replace(r"\*", ".*")
