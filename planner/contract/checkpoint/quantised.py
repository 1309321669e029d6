"""Quantised checkpoints as the planner counts them: a matrix and its scales as one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.stored.scheme import Scheme, sort_tensors
from penstock.planner.contract.stored.schemes import READ, scheme_of

_TELLING = ("bits", "w_bit", "group_size", "sym", "desc_act", "version", "format", "packing_format", "weight_block_size", "quant_algo")
"""Keys of a quantization_config by which a variant of a method is known."""


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
    """What ``config`` (unwrapped) says; None for weights as they were trained. UserError names a method, or a variant of one, that is not
    read."""
    said = config.get("quantization_config") or config.get("quantization")
    if not said:
        return None
    found = scheme_of(said, where) if isinstance(said, Mapping) else None
    if found is None:
        raise UserError(
            f"{where}: {_told(said)} is not read; read are {READ}: use another quantisation of the model, or its BF16 checkpoint"
        )
    return found


def _told(said: Any) -> str:
    """What a quantization_config says, in a few words."""
    if not isinstance(said, Mapping):
        return f"quantization_config {str(said)[:40]!r}"
    method = said.get("quant_method")
    known = [f"{key} {str(said[key])[:40]}" for key in _TELLING if said.get(key) is not None]
    known += [
        f"{key} {weights[key]}" for weights in _weights(said) for key in ("num_bits", "type", "strategy", "group_size") if weights.get(key)
    ]
    named = f"quant_method {str(method)[:40]!r}" if method else "a quantization_config without quant_method, as MLX writes it,"
    return f"{named} with {', '.join(known)}" if known else named


def _weights(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What each group of compressed-tensors says of weights."""
    groups = said.get("config_groups")
    found = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    return [weights for weights in found if isinstance(weights, Mapping)]
