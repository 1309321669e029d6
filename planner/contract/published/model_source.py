"""What ``model.checkpoint=`` names: a checkpoint, a config alone, or a repository on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import CONFIG, PACK_MANIFEST, parse_object, read_bytes, spec_from_checkpoint
from penstock.planner.contract.checkpoint.known_types import refuse_unknown_type
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.given.model import ModelSpec
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
    path = Path(text).expanduser() if name is None else config_folder(name)
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


def _spec_of_config(path: Path, name: str) -> ModelSpec:
    return spec_of_published(parse_object(path, read_bytes(path, f"{path}: no such file")), name, str(path))


def _without_weights(directory: Path) -> bool:
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError:
        return False
    return CONFIG in names and PACK_MANIFEST not in names and not any(name.endswith(WEIGHTS) for name in names)
