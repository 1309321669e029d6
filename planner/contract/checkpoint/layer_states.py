"""What each layer keeps of a sequence: K and V of every token, a state of fixed size, or both. Read off the tensors' names and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STATE = re.compile(r"(?:^|[._])(?:a_log|conv1d|conv_1d|conv|dt_bias|recurrent_param)(?:[._]|$)", re.IGNORECASE)
"""Words that only a mixer with a state has in its tensors' names."""
_KERNEL = re.compile(r"(?:^|[._])(?:\w?_?conv1d|conv_1d|conv)\.weight$")
_FUSED_KV = re.compile(r"(?:^|[._])(?:c_attn|qkv_proj|query_key_value|wqkv|qkv|in_proj|kv_b_proj|kv_a_proj_with_mqa)\.")
_STATE_WIDTHS = ("mamba_d_state", "ssm_state_size", "state_size")
_HEAD_WIDTHS = ("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
RECURRENT_BYTES = 4
"""Of an element of a recurrent state, which most models keep in float32."""


@dataclass(frozen=True)
class LayerState:
    """Of one layer."""

    kv_elements: int = 0
    """K and V of one token."""
    kernel_elements: int = 0
    """What a convolution along the tokens keeps of a sequence, in the type of the weights."""
    recurrent_elements: int = 0

    def state_bytes(self, dtype_bytes: int) -> int:
        """Of one sequence beside K and V."""
        return self.kernel_elements * dtype_bytes + self.recurrent_elements * RECURRENT_BYTES


def layer_states(config: Mapping[str, Any], layers: Sequence[Mapping[str, tuple[int, ...]]], kv_width: int) -> tuple[LayerState, ...]:
    """One for each of ``layers``, which give the shapes of a layer's tensors by their names in it.

    ``kv_width`` holds for layers whose K has no projection of its own. A layer that ``layer_types`` calls linear keeps no K and V.
    """
    types = config.get("layer_types")
    named = types if isinstance(types, list) and len(types) == len(layers) else [""] * len(layers)
    shared = config.get("num_kv_shared_layers")
    own = len(layers) - (shared if type(shared) is int and 0 < shared < len(layers) else 0)
    return tuple(_state(config, shapes, kv_width if i < own else 0, str(named[i])) for i, shapes in enumerate(layers))


def keeps_state(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether some mixer of a layer with these tensors keeps a state of fixed size."""
    return bool(_stateful(shapes))


def _stateful(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """The layer's children that do."""
    return {name.partition(".")[0] for name in shapes if _STATE.search(name)}


def _state(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], kv_width: int, named: str) -> LayerState:
    stateful = _stateful(shapes)
    attention = {name: shape for name, shape in shapes.items() if name.partition(".")[0] not in stateful}
    kernel = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 3 and _KERNEL.search(name))
    recurrent = sum(_recurrent(config, name, shape) for name, shape in shapes.items())
    if named.startswith("linear") and not stateful:
        return LayerState(recurrent_elements=kv_width * _first(config, ("head_dim",), 1))
    return LayerState(_kv(attention, kv_width), kernel, recurrent)


def _kv(shapes: Mapping[str, tuple[int, ...]], kv_width: int) -> int:
    """K and V of one token in a layer whose attention has these tensors: 0 where the layer has none, or takes another layer's."""
    keys = [shape[0] for name, shape in shapes.items() if name.endswith(("k_proj.weight", ".key.weight")) and shape]
    values = [shape[0] for name, shape in shapes.items() if name.endswith(("v_proj.weight", ".value.weight")) and shape]
    if keys and kv_width:
        return sum(keys) + (sum(values) or sum(keys))
    return 2 * kv_width if any(_FUSED_KV.search(name) for name in shapes) else 0


def _recurrent(config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> int:
    """Elements of the state that the parameter ``name`` decays: [channels, state], or one a head, or one a channel."""
    if name.endswith("recurrent_param"):
        return math.prod(shape)
    if not name.endswith("A_log"):
        return 0
    if len(shape) == 2:
        return math.prod(shape)
    linear = _first(config, ("linear_key_head_dim", "linear_head_dim"), 0)
    if linear:
        return math.prod(shape) * linear * _first(config, ("linear_value_head_dim",), linear)
    return math.prod(shape) * _first(config, _HEAD_WIDTHS, 1) * _first(config, _STATE_WIDTHS, _first(config, ("head_dim",), 1))


def _first(config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    return next((config[key] for key in keys if type(config.get(key)) is int and config[key] > 0), default)
