"""What a run is asked: token ids from text, or at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from planner.errors import UserError

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Request:
    """One prompt as token ids; ``cut`` tokens were dropped from its head to fit."""

    ids: tuple[int, ...]
    cut: int


@dataclass(frozen=True)
class Vocabulary:
    """A checkpoint's tokenizer, None when it has none, and the ids that it ends and pads with."""

    tokenizer: PreTrainedTokenizerBase | None
    stop_ids: frozenset[int]
    pad: int
    size: int

    def text(self, ids: list[int]) -> str:
        """Decoded text; ids separated by spaces without a tokenizer."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def read_vocabulary(directory: Path, vocab_size: int) -> Vocabulary:
    """Tokenizer and stop tokens of a checkpoint directory, the latter from config.json where there is no generation_config.json."""
    tokenizer = None
    if any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise UserError(f"{directory}: the tokenizer cannot be read ({_first_line(error)}); download its files again") from error
    try:
        if (directory / GENERATION).exists():
            generation = GenerationConfig.from_pretrained(directory)
        else:
            generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(directory))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{directory}: {GENERATION} cannot be read ({_first_line(error)}); download it again, or remove it") from error
    eos = generation.eos_token_id
    stop = frozenset([eos] if isinstance(eos, int) else eos or ())
    pad = generation.pad_token_id if generation.pad_token_id is not None else min(stop, default=0)
    return Vocabulary(tokenizer, stop, pad, vocab_size)


def requests_of(texts: Sequence[str], vocabulary: Vocabulary, limit: int) -> list[Request]:
    """One request a text; one that is longer than ``limit`` tokens keeps its tail."""
    if vocabulary.tokenizer is None:
        raise UserError("the checkpoint has no tokenizer, so text cannot be read; leave prompt= and prompts= out for random tokens")
    requests = []
    for text in texts:
        ids = vocabulary.tokenizer(text)["input_ids"]
        if not ids:
            raise UserError(f"prompt {text!r} has no tokens; give some text")
        requests.append(_request(ids, limit))
    return requests


def random_requests(count: int, tokens: int, vocab_size: int, limit: int, seed: int) -> list[Request]:
    """``count`` requests of ``tokens`` random ids each, the same for the same ``seed``; over-long ones keep their tail."""
    draw = random.Random(seed)
    return [_request([draw.randrange(vocab_size) for _ in range(tokens)], limit) for _ in range(count)]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _request(ids: Sequence[int], limit: int) -> Request:
    return Request(tuple(ids[-limit:]), max(0, len(ids) - limit))
