"""What ``model.checkpoint=`` names: a checkpoint, a config alone, or a repository on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.checkpoint.checkpoint_files import CONFIG, PACK_MANIFEST, parse_object, read_bytes, spec_from_checkpoint
from penstock.planner.contract.checkpoint.further_heads import heads_config
from penstock.planner.contract.checkpoint.known_types import refuse_unknown_type
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec
from penstock.planner.contract.published.config_spec import spec_from_config
from penstock.planner.contract.published.hub_names import config_folder, hub_name

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
"""Ends of the names of files that hold weights, in formats that are read or refused by name."""


def spec_from_source(text: str) -> ModelSpec:
    """The spec of the model that ``text`` names: a directory, a config.json, or ``ORG/NAME`` on the hub.

    With weights, whole or packed, they are read as they lie; without, sizes follow from the config, and the spec has no checkpoint.
    Raises UserError naming what is missing.
    """
    name = hub_name(text)
    path = user_path(text) if name is None else config_folder(name)
    if path.is_file() and path.name == CONFIG:
        return _spec_of_config(path, path.absolute().parent.name)
    if _without_weights(path):
        return _spec_of_config(path / CONFIG, name or path.absolute().name)
    spec = spec_from_checkpoint(path)
    return spec if name is None else replace(spec, name=name)


def spec_of_published(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    """The spec of the model that the content ``config`` of a config.json, read from ``where``, describes."""

    def built() -> Mapping[str, TensorInfo]:
        from penstock.planner.contract.published.meta_build import described

        refuse_unknown_type(config, where)
        found = described(config, where)
        if found.refused is not None:
            raise UserError(found.refused)
        return found.tensors

    return spec_from_config(config, name, where, built)


def further_heads_of(config: Mapping[str, Any], model: ModelSpec) -> ModelSpec | None:
    """The heads of ``model`` that predict further tokens, as its published ``config`` says; None where it names none. Beside a layer they
    have a projection of two hidden states to one."""
    if not config.get("num_nextn_predict_layers") or model.state_bytes:
        return None
    layer = spec_of_published(heads_config(config), f"the further heads of {model.name}", f"model={model.name}")
    more = 2 * model.hidden**2

    def widened(unit: UnitSpec) -> UnitSpec:
        return replace(unit, elements=unit.elements + more, stored_bytes=unit.stored_bytes + more * layer.compute_dtype.nbytes)

    return replace(layer, units=tuple(widened(unit) if unit.kind is UnitKind.norm else unit for unit in layer.units))


def _spec_of_config(path: Path, name: str) -> ModelSpec:
    return spec_of_published(parse_object(path, read_bytes(path, f"{path}: no such file")), name, str(path))


def _without_weights(directory: Path) -> bool:
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError:
        return False
    return CONFIG in names and PACK_MANIFEST not in names and not any(name.endswith(WEIGHTS) for name in names)
