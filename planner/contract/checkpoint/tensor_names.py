"""Which unit a checkpoint's tensor belongs to, by its name alone. Planner and store divide a decoder layer by the same rule."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

FUSED = -1
"""The expert index of a tensor that holds every routed expert of its layer."""

_MIXERS = frozenset({"attn", "attention", "attentions", "mixer", "mamba", "conv", "ssm", "temporal", "linear", "transformer", "lru"})
_FFNS = frozenset({"mlp", "mlps", "ffn", "ffw", "ff", "feed", "feedforward", "moe", "expert", "experts", "router", "fc"})
_NORMS = frozenset({"ln", "norm", "layernorm"})

_NUMBERED = re.compile(r"((?:.*?\.)?[A-Za-z_]\w*)\.([0-9]{1,6})\.(.+)", re.DOTALL)
_INDEX = re.compile(r"(?<=\.)([0-9]{1,6})(?=\.)")
_EXPERT = re.compile(r"(?:^|\.)experts\.([0-9]{1,6}(?=\.))?")
_IGNORED = re.compile(
    r"(?:^|\.)(?:vision_\w+|visual|vit|audio_\w+|image_\w+|embed_vision|embed_audio|multi_modal_projector|mm_projector|speech_\w+|aligner|mtp)(?:\.|$)"
)
"""Towers of other modalities, and stacks that predict further tokens."""
_RECOMPUTED = re.compile(r"rotary_emb\.inv_freq$|(?:^|\.)(?:self_)?(?:attn|attention)\.(?:bias|masked_bias|causal_mask|embed_positions)$")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|embeddings|tok_embeddings)\.weight$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight$|^decoder\.weight$")


@dataclass(frozen=True)
class TensorRole:
    """What a tensor is for: ``attn``, ``ffn``, ``norm`` (always resident), ``embed``, ``head`` or ``ignored``."""

    kind: str
    layer: int | None = None
    """Its number in a list of layers, when it lies under one."""
    expert: int | None = None
    """The routed expert that it belongs to, ``FUSED`` when it holds all of them, None for anything else."""
    stack: str = ""
    """The list's name, as ``model.layers``: one decoder has one."""
    rest: str = field(default="", compare=False)
    """What follows the layer's number."""

    @property
    def child(self) -> str:
        """The layer's direct child that holds it, or its own name."""
        return self.rest.partition(".")[0]

    @property
    def is_one_of_many(self) -> bool:
        """Whether that child is a list."""
        return self.rest.split(".")[1:2] != [] and self.rest.split(".")[1].isdigit()


def block_of(child: str) -> str | None:
    """Which block of a decoder layer its direct child ``child`` is of: ``attn`` for whatever mixes along tokens, ``ffn`` for what does
    not, None for what is always resident, as norms are."""
    words = {word for word in re.split(r"[_0-9]+", child.lower()) if word}
    if any(word in _NORMS or word.endswith("norm") for word in words):
        return None
    return "ffn" if words & _FFNS else "attn" if words & _MIXERS else None


def one_block(blocks: set[str], mixes_often: bool) -> bool:
    """Whether all of a layer is one unit, its ``ffn``: where it has one of the ``blocks`` only, and where its mixers are a list, which FFNs
    interleave."""
    return mixes_often or len(blocks) < 2


def is_recomputed(name: str) -> bool:
    """Whether a model computes the tensor ``name`` anew, whatever is stored."""
    return _RECOMPUTED.search(name) is not None


def classify(name: str) -> TensorRole:
    """The role of the tensor ``name``. Vision and audio towers of multimodal checkpoints, layers for multi-token prediction, and buffers
    that a model recomputes are ignored."""
    between = _INDEX.split(name)
    role = _classified(tuple(between[::2]))
    if role.layer is None:
        return role
    if role.layer:
        return _classify(name)
    expert = role.expert if role.expert in (None, FUSED) else int(between[2 * role.expert + 1])
    return TensorRole(role.kind, int(between[1]), expert, role.stack, name[len(role.stack) + len(between[1]) + 2 :])


@lru_cache(maxsize=4096)
def _classified(texts: tuple[str, ...]) -> TensorRole:
    """The role of all names that have ``texts`` around their numbers: layer and expert say which of the numbers they are."""
    return _classify("".join(f"{number}{text}" for number, text in zip(("", *range(len(texts))), texts, strict=False)))


def _classify(name: str) -> TensorRole:
    if _IGNORED.search(name) or is_recomputed(name):
        return TensorRole("ignored")
    match = _NUMBERED.fullmatch(name)
    if match:
        child, dot, _ = match[3].partition(".")
        kind = (block_of(child) if dot else None) or "norm"
        found = _EXPERT.search(match[3]) if kind != "norm" else None
        expert = None if found is None else int(found[1]) if found[1] else FUSED
        return TensorRole(kind, int(match[2]), expert, match[1], match[3])
    return TensorRole("embed" if _EMBEDDING.search(name) else "head" if _HEAD.search(name) else "norm")
