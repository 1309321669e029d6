"""adapter_config.json of a PEFT adapter: what kind it is, and the factor of each module's product."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import parse_object, read_bytes
from penstock.planner.contract.checkpoint.foreign_files import ADAPTER_CONFIG

_OTHERWISE = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "trainable_token_indices", "target_parameters",
    "alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config", "kasa_config",
)  # fmt: skip
"""Keys that, given, make another product than B @ A of it, or another place."""
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga")
"""Ways to begin that subtract something of the base's weights, so that the base alone is not what was trained on."""


@dataclass(frozen=True)
class AdapterConfig:
    """A plain LoRA adapter's."""

    base: str | None
    """The model that it is for."""
    alpha: float
    root: bool
    """Whether the factor is alpha / sqrt(r), as rsLoRA has it, in place of alpha / r."""
    alphas: Mapping[str, float]
    """Patterns of module names with an alpha of their own."""

    @classmethod
    def read(cls, directory: Path) -> AdapterConfig:
        """UserError for what is no adapter, or one of a kind that is not merged."""
        path = directory / ADAPTER_CONFIG
        found = parse_object(path, read_bytes(path, f"adapter={directory}: no {ADAPTER_CONFIG} in it; name a PEFT adapter's directory"))
        if found.get("peft_type") != "LORA":
            raise UserError(f"{path}: peft_type is {str(found.get('peft_type'))[:40]!r}, allowed is 'LORA'; merge it by PEFT")
        other = next((key for key in _OTHERWISE if found.get(key)), None)
        how = found.get("init_lora_weights")
        if found.get("bias", "none") != "none":
            other = "bias"
        if isinstance(how, str) and how.startswith(_CHANGES_BASE):
            other = "init_lora_weights"
        if other is not None:
            raise UserError(f"{path}: {other}={str(found[other])[:40]} is not merged here; merge it by PEFT's merge_and_unload")
        alpha, alphas, base = found.get("lora_alpha", 8), found.get("alpha_pattern") or {}, found.get("base_model_name_or_path")
        if not _number(alpha) or not isinstance(alphas, dict) or not all(map(_number, alphas.values())):
            raise UserError(f"{path}: lora_alpha and alpha_pattern must be numbers; download the adapter again")
        return cls(base if isinstance(base, str) else None, alpha, found.get("use_rslora") is True, alphas)

    def factor(self, module: str, rank: int) -> float:
        """Of ``module``'s product, whose A has ``rank`` rows: PEFT's ``scaling``."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _matches(pattern, module)), self.alpha)
        return alpha / math.sqrt(rank) if self.root else alpha / rank


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _matches(pattern: str, module: str) -> bool:
    """As PEFT's ``get_pattern_key``."""
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise UserError(f"{ADAPTER_CONFIG}: alpha_pattern has {pattern[:40]!r}, no pattern ({error}); download the adapter again") from None
