"""Which models' FFNs are one MLP that a CPU can compute beside a card, known without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from penstock.planner.contract.checkpoint.tensor_names import block_of

ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
)
"""transformers' name -> what it computes."""
_GATED = frozenset({"gate_proj", "up_proj", "down_proj"})
_PLAIN = frozenset({"fc1", "fc2"})
_LLAMAS = frozenset(
    {"cohere", "cohere2", "cwm", "diffllama", "ernie4_5", "exaone4", "granite", "helium", "hunyuan_v1_dense", "llama", "ministral"}
    | {"ministral3", "mistral", "olmo", "olmo2", "olmo3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "youtu"}
)
_GEMMAS = ("gemma2", "gemma3_text", "vaultgemma")
_KNOWN: Mapping[str, tuple[str, str, frozenset[str]]] = MappingProxyType(
    dict.fromkeys(_LLAMAS, ("hidden_act", "", _GATED))
    | dict.fromkeys(_GEMMAS, ("hidden_activation", "gelu_pytorch_tanh", _GATED))
    | {"phi": ("hidden_act", "", _PLAIN)}
)
"""Model type -> config.json's key for the activation, its value where published configs leave it out, and the projections of the ``mlp``.
Each class computes

    gated   down_proj(act(gate_proj(x)) * up_proj(x))
    plain   fc2(act(fc1(x)))

and nothing else, as transformers v5 has it."""


def ffn_activation(config: Mapping[str, Any], layers: Collection[Collection[str]]) -> str:
    """What ``ModelSpec.ffn_activation`` is of the text config ``config`` and, of each layer, the names of its tensors. Parts of a coded
    matrix may stand beside its weight."""
    known = _KNOWN.get(str(config.get("model_type", "")))
    if known is None or not all(_projections(names) == known[2] for names in layers):
        return ""
    return ACTIVATIONS.get(str(config.get(known[0], known[1])), "")


def _projections(names: Collection[str]) -> frozenset[str]:
    """Modules of a layer's ``mlp``; what else belongs to its FFN stands there by its whole name."""
    ffn = [name for name in names if block_of(name.partition(".")[0]) == "ffn"]
    return frozenset(name.split(".")[1] if name.startswith("mlp.") and name.count(".") == 2 else name for name in ffn)
