"""A checkpoint whose model drafts for another one: its tokens must be the same, and its sequences must go back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.checkpoint.checkpoint_files import (
    CONFIG,
    PACK_MANIFEST,
    parse_object,
    read_bytes,
    spec_from_checkpoint,
)
from penstock.planner.contract.checkpoint.further_heads import FURTHER_HEADS
from penstock.planner.contract.given.model import ModelSpec

TOKENIZER = "tokenizer.json"
_OF_EAGLE = ("eagle_config", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
"""Keys that only EAGLE heads have in their config.json."""


def heads_spec(target: ModelSpec) -> ModelSpec:
    """The spec of ``target``'s own heads that predict further tokens, tables that they share with it included. Reads headers. UserError
    where it has none, and where nothing says."""
    if target.checkpoint is None:
        raise UserError(
            f"speculate=mtp: nothing says that {target.name} has heads that predict further tokens; set model.checkpoint to one that "
            "has, or speculate=lookup"
        )
    if target.state_bytes:
        raise UserError(
            f"speculate=mtp: {target.name} keeps states that cannot go back to an earlier token, so it verifies none; set speculate=none"
        )
    if (Path(target.checkpoint) / PACK_MANIFEST).exists():
        raise UserError(
            f"speculate=mtp: {target.checkpoint} is a packed store, which leaves further heads out; set model.checkpoint to the checkpoint "
            "that it was made from"
        )
    return spec_from_checkpoint(Path(target.checkpoint) / FURTHER_HEADS)


def drafter_spec(given: str, target: ModelSpec) -> ModelSpec:
    """The spec of the checkpoint ``draft=given``, which is to draft for ``target``. Reads headers and both tokenizers. UserError where its
    tokens are others, or where it keeps states that cannot go back to an earlier token."""
    _refuse_eagle(given)
    try:
        spec = spec_from_checkpoint(user_path(given))
    except UserError as error:
        raise UserError(f"draft={given}: {str(error).removeprefix(f'{given}: ')}") from error
    if spec.state_bytes:
        raise UserError(
            f"draft={given}: {spec.name} keeps states that cannot go back to an earlier token; choose a model that has K and V alone"
        )
    mine, its = (_tokens(one.checkpoint) for one in (spec, target))
    if mine is None or its is None:
        if spec.vocab != target.vocab:
            raise UserError(
                f"draft={given}: it has {spec.vocab} tokens and {target.name} {target.vocab}; choose a model with the same tokenizer"
            )
    elif mine != its:
        name = next(name for name in sorted({*mine, *its}) if mine.get(name) != its.get(name))
        raise UserError(
            f"draft={given}: its tokens are not those of {target.name}: {name!r} is {mine.get(name, 'missing')} there and"
            f" {its.get(name, 'missing')} here; choose a model with the same tokenizer"
        )
    return spec


def _refuse_eagle(given: str) -> None:
    """UserError for heads that read another model's hidden states."""
    path = user_path(given) / CONFIG
    if not path.is_file():
        return
    said = parse_object(path, read_bytes(path, f"{path}: no such file"))
    kinds = [said.get("model_type"), said.get("speculators_model_type"), *(said.get("architectures") or [])]
    if any("eagle" in str(kind).lower() for kind in kinds) or any(key in said for key in _OF_EAGLE):
        raise UserError(
            f"draft={given}: EAGLE heads read the hidden states of the model that they were trained for, and are not supported; choose a "
            "whole model with the same tokenizer, or speculate=self"
        )


def _tokens(checkpoint: str | None) -> Mapping[str, int] | None:
    """Token -> its id, by tokenizer.json beside the weights; None where there is none that says so."""
    path = None if checkpoint is None else Path(checkpoint) / TOKENIZER
    if path is None or not path.is_file():
        return None
    said = parse_object(path, read_bytes(path, f"{path}: no such file; download it again"))
    vocabulary, added = said.get("model"), said.get("added_tokens")
    known: Any = vocabulary.get("vocab") if isinstance(vocabulary, dict) else None
    if not isinstance(known, dict):
        return None
    extra = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    return known | {str(one.get("content")): one.get("id") for one in extra}
