"""Which unit a checkpoint's tensor belongs to, by its name alone. Planner and store classify with the same rule."""

from __future__ import annotations

import re
from dataclasses import dataclass

FFN_MODULES = ("mlp", "block_sparse_moe", "feed_forward")
"""Names under a decoder layer that hold its feed-forward block."""

FUSED = -1
"""The expert index of a tensor that holds every routed expert of its layer."""

_LAYER = re.compile(r"((?:.*?\.)?)layers\.([0-9]{1,6})\.(.+)", re.DOTALL)
_EXPERT = re.compile(r"\.experts\.([0-9]{1,6}(?=\.))?")
_OTHER_MODALITY = re.compile(
    r"(?:^|\.)(?:vision_\w+|visual|audio_\w+|image_\w+|embed_vision|embed_audio|multi_modal_projector|mm_projector|speech_\w+)(?:\.|$)"
)
_RECOMPUTED = re.compile(r"rotary_emb\.inv_freq$|self_attn\.(?:bias|masked_bias)$")


@dataclass(frozen=True)
class TensorRole:
    """What a tensor is for: ``attn``, ``ffn``, ``norm`` (always resident), ``embed``, ``head`` or ``ignored``."""

    kind: str
    layer: int | None = None
    """The decoder layer, when the tensor lies under one."""
    expert: int | None = None
    """The routed expert that it belongs to, ``FUSED`` when it holds all of them, None for anything else."""
    stack: str = ""
    """What stands before ``layers.``: one decoder has one stack."""


def classify(name: str) -> TensorRole:
    """The role of the tensor ``name``.

    Under ``layers.{i}.``: ``self_attn.`` is attention, ``mlp.``, ``block_sparse_moe.`` and ``feed_forward.`` are the FFN, the
    rest is resident. Vision and audio towers of multimodal checkpoints, and buffers that a model recomputes, are ignored.
    """
    if _OTHER_MODALITY.search(name) or _RECOMPUTED.search(name):
        return TensorRole("ignored")
    match = _LAYER.fullmatch(name)
    if match:
        stack, layer, rest = match[1], int(match[2]), match[3]
        module = rest.split(".", 1)[0]
        if module == "self_attn":
            return TensorRole("attn", layer, stack=stack)
        if module in FFN_MODULES:
            expert = _EXPERT.search(rest)
            index = None if expert is None else int(expert[1]) if expert[1] else FUSED
            return TensorRole("ffn", layer, index, stack)
        return TensorRole("norm", layer, stack=stack)
    if name == "embed_tokens.weight" or name.endswith(".embed_tokens.weight"):
        return TensorRole("embed")
    if name == "lm_head.weight" or name.endswith(".lm_head.weight"):
        return TensorRole("head")
    return TensorRole("norm")
