"""A checkpoint whose model drafts for another one: its tokens must be the same, and its sequences must go back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import parse_object, read_bytes, spec_from_checkpoint
from penstock.planner.contract.given.model import ModelSpec

TOKENIZER = "tokenizer.json"


def drafter_spec(given: str, target: ModelSpec) -> ModelSpec:
    """The spec of the checkpoint ``draft=given``, which is to draft for ``target``. Reads headers and both tokenizers. UserError where its
    tokens are others, or where it keeps states that cannot go back to an earlier token."""
    spec = spec_from_checkpoint(Path(given).expanduser())
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
