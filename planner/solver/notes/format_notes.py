"""What a plan says of weights that are stored coded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.checkpoint.checkpoint_files import CONFIG, parse_object, read_bytes
from penstock.planner.contract.checkpoint.hf_config import text_config
from penstock.planner.contract.config.config_schema import ModelConfig
from penstock.planner.contract.given.formats import in_rows
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.prices.on_cpu import no_f16_rates
from penstock.planner.contract.published.hub_names import config_folder, hub_name
from penstock.planner.contract.stored.activations import named_activations, names_kv


def format_notes(model: ModelSpec, asked: ModelConfig, hardware: HardwareProfile) -> Iterator[str]:
    """What of the quantization_config of ``model`` runs do not follow, and what would make its products faster on ``hardware``."""
    said = _said(asked)
    computed = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[model.compute_dtype]
    if named := named_activations(said):
        yield f"activations stay {computed}: the checkpoint names {named} for them, and only weights are taken as it stores them"
    if names_kv(said):
        yield f"KV stays {model.kv_dtype.value}: the checkpoint names another dtype for it"
    if turned := sorted({unit.format.name for unit in model.units if in_rows(unit.format)}):
        yield f"numbers of {', '.join(turned)} lie in another order than products read: `runtime pack format=rows` mends it, to the bit"
    if no_f16_rates(hardware, model):
        yield "the CPU multiplies nothing beside the card: the profile has no rates of it with F16, which `planner probe` measures"


def _said(asked: ModelConfig) -> Mapping[str, Any]:
    """The quantization_config of what ``asked`` names; empty where there is none."""
    config: Mapping[str, Any] = asked.config
    if asked.checkpoint is not None:
        name = hub_name(asked.checkpoint)
        path = user_path(asked.checkpoint) if name is None else config_folder(name)
        path = path if path.name == CONFIG else path / CONFIG
        config = text_config(parse_object(path, read_bytes(path, f"{path}: no such file"))) if path.is_file() else {}
    found = config.get("quantization_config")
    return found if isinstance(found, Mapping) else {}
