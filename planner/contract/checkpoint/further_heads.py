"""A checkpoint's heads that predict further tokens, as a checkpoint of their own: a decoder of one layer.

DeepSeek-V3 and GLM-4.5 store them as layers behind the last one, Qwen3-Next as ``mtp``. The layer reads, beside a token, the hidden state
of the model before it: ``eh_proj(cat(enorm(embedding), hnorm(hidden)))`` (https://arxiv.org/abs/2412.19437, equation 21). Embedding and LM
head are the model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.hf_config import LAYER_KEYS
from penstock.planner.contract.checkpoint.tensor_names import classify

FURTHER_HEADS = "further-heads"
"""The name by which a checkpoint's directory is asked for its heads."""
_BEHIND = re.compile(r"(?P<stack>(?P<decoder>(?:.*\.)?)layers\.)(?P<layer>\d+)\.eh_proj\.", re.DOTALL)
_BESIDE = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
"""Of ``mtp``: what the layer's own parts are called."""
_SHARED = ("embed_tokens.", "shared_head.head.")
"""Of the layer: copies of the model's own tables."""


def heads_source(path: Path) -> Path | None:
    """The checkpoint whose heads ``path`` names; None for what is a checkpoint itself."""
    return path.parent if path.name == FURTHER_HEADS and not path.exists() else None


def head_tensors(names: Mapping[str, object], config: Mapping[str, Any], where: str) -> dict[str, str]:
    """Of a checkpoint with tensors ``names``: name in the decoder of one layer -> name in the checkpoint. Of several heads the first one.
    UserError where it has none."""
    layers = next((config[key] for key in LAYER_KEYS if isinstance(config.get(key), int)), None)
    behind = next((found for name in names if (found := _BEHIND.match(name)) and int(found["layer"]) == layers), None)
    made = dict(_behind(names, behind) if behind is not None else _beside(names))
    if not any(name.endswith(".eh_proj.weight") for name in made):
        raise UserError(
            f"speculate=mtp: {where} has no heads that predict further tokens, as DeepSeek-V3 and GLM-4.5 have behind their last layer; "
            "set speculate=lookup, or speculate=draft with draft=DIR"
        )
    tables = (name for name in names if (role := classify(name)).kind in ("embed", "head") and role.layer is None)
    return made | {name: name for name in tables}


def _behind(names: Mapping[str, object], found: re.Match[str]) -> Iterator[tuple[str, str]]:
    """As a layer behind the last one."""
    prefix = f"{found['stack']}{found['layer']}."
    for name in names:
        rest = name.removeprefix(prefix)
        if rest == name or rest.startswith(_SHARED):
            continue
        norm = rest.removeprefix("shared_head.norm.")
        yield (f"{found['stack']}0.{rest}" if norm == rest else f"{found['decoder']}norm.{norm}"), name


def _beside(names: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """As ``mtp`` beside the decoder."""
    stack = next((role.stack for name in names if (role := classify(name)).kind == "attn"), "")
    for name in names:
        if not name.startswith("mtp."):
            continue
        part, _, rest = name.removeprefix("mtp.").partition(".")
        if part in _BESIDE:
            yield f"{stack}.0.{_BESIDE[part]}.{rest}", name
        elif part == "norm":
            yield f"{stack.removesuffix('layers')}norm.{rest}", name
        elif rest.startswith("0."):
            yield f"{stack}.{rest}", name


def heads_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the decoder of one layer. Where layers have experts, this one has."""
    made = dict(config) | {key: 1 for key in LAYER_KEYS if key in config}
    kinds = {"layer_types": "mtp_layer_types", "mlp_layer_types": "mtp_mlp_layer_types"}
    made |= {key: list(config.get(own) or config[key][-1:])[:1] for key, own in kinds.items() if config.get(key)}
    changed = {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "mlp_only_layers": []}
    return made | {key: value for key, value in changed.items() if key in config}
