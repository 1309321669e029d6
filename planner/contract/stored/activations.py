"""What a quantization_config names beside its weights, which runs do not follow: dtypes of activations and of KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def named_activations(said: Mapping[str, Any]) -> str:
    """The dtype that ``said`` names for activations, ``FP8`` or ``INT8``; empty for weights alone."""
    method = said.get("quant_method")
    if method == "fbgemm_fp8" or (method == "fp8" and said.get("activation_scheme")):
        return "FP8"
    if method == "modelopt":
        return {"NVFP4": "FP4", "FP8": "FP8"}.get(str(said.get("quant_algo")), "")
    groups = said.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        inputs = group.get("input_activations") if isinstance(group, Mapping) else None
        if isinstance(inputs, Mapping):
            return f"{'FP' if inputs.get('type') == 'float' else 'INT'}{inputs.get('num_bits')}"
    return ""


def names_kv(said: Mapping[str, Any]) -> bool:
    """Whether ``said`` names a dtype for KV."""
    return bool(said.get("kv_cache_scheme") or said.get("kv_cache_quant_algo"))
