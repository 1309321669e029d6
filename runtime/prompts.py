"""What a run is asked: token ids from text, a file of texts, or at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from planner.errors import UserError


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
    """Tokenizer and stop tokens of a checkpoint directory."""
    tokenizer = None
    if any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        tokenizer = AutoTokenizer.from_pretrained(directory)
    generation = GenerationConfig()
    if (directory / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(directory)
    eos = generation.eos_token_id
    stop = frozenset([eos] if isinstance(eos, int) else eos or ())
    pad = generation.pad_token_id if generation.pad_token_id is not None else min(stop, default=0)
    return Vocabulary(tokenizer, stop, pad, vocab_size)


def read_requests(
    vocabulary: Vocabulary, prompt: str | None, prompts: Path | None, random_count: int, random_tokens: int, seed: int, limit: int
) -> list[Request]:
    """Requests from ``prompt``, from each line of ``prompts``, or ``random_count`` random ones of ``random_tokens`` tokens.

    A prompt longer than ``limit`` tokens keeps its tail.
    """
    if prompt is not None and prompts is not None:
        raise UserError(f"prompt={prompt!r} and prompts={prompts} are both given; choose one")
    if prompt is None and prompts is None:
        draw = random.Random(seed)
        return [Request(tuple(draw.randrange(vocabulary.size) for _ in range(min(random_tokens, limit))), 0) for _ in range(random_count)]
    if vocabulary.tokenizer is None:
        raise UserError("the checkpoint has no tokenizer, so text cannot be read; leave prompt= and prompts= out for random tokens")
    texts = [prompt] if prompt is not None else _lines(prompts)
    requests = []
    for text in texts:
        ids = vocabulary.tokenizer(text)["input_ids"]
        if not ids:
            raise UserError(f"prompt {text!r} has no tokens; give some text")
        requests.append(Request(tuple(ids[-limit:]), max(0, len(ids) - limit)))
    return requests


def _lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts={path}: cannot read it ({error}); give a text file with one prompt a line") from error
    if not lines:
        raise UserError(f"prompts={path}: no prompt in it; give one a line")
    return lines
