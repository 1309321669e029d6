"""How tokens are chosen: the keys of it, what a checkpoint's generation_config.json says, and which of them counts. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from penstock.planner.common.errors import UserError

FILE = "generation_config.json"
TOP_K = 50
"""transformers' own ``top_k`` where tokens are drawn and nothing says how (``GenerationConfig``)."""
WARPERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""Keys that have an effect on drawn tokens alone."""
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram")
_IN_FILE = {"no_repeat_ngram": "no_repeat_ngram_size"}
"""Keys that the file calls otherwise."""
_NOT_OBEYED: Mapping[str, Any] = MappingProxyType(
    {
        "num_beams": 1,
        "penalty_alpha": None,
        "guidance_scale": 1,
        "sequence_bias": None,
        "bad_words_ids": None,
        "min_length": 0,
        "min_new_tokens": 0,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "exponential_decay_length_penalty": None,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        "top_h": None,
        "epsilon_cutoff": 0,
        "eta_cutoff": 0,
        "watermarking_config": None,
    }
)
"""What the file may say besides, each with the value that changes nothing."""


@dataclass(kw_only=True)
class SamplingKeys:
    """How tokens are chosen. A key that is null takes what the checkpoint's generation_config.json says, else transformers' default."""

    greedy: bool | None = None
    """true: always the likeliest token, whatever generation_config.json says; its penalties stay. null: as that file says, unless one of
    temperature, top_k, top_p, min_p and typical_p is given, which draw."""
    temperature: float | None = None
    """What the logits are divided by before a token is drawn; 0 is greedy."""
    top_k: int | None = None
    """How many of the likeliest tokens sampling keeps; 0 keeps all."""
    top_p: float | None = None
    """Share of probability that sampling keeps."""
    min_p: float | None = None
    """Sampling keeps tokens with at least this share of the likeliest one's probability; 0 keeps all."""
    typical_p: float | None = None
    """Share of probability that sampling keeps, of the tokens nearest to the expected information; 1 keeps all."""
    repetition_penalty: float | None = None
    """Above 1, tokens of the prompt and of the reply become less likely, by division of their logits; 1 is none."""
    frequency_penalty: float | None = None
    """Taken off a token's logit for each time that the reply has it; 0 is none."""
    presence_penalty: float | None = None
    """Taken off the logit of each token that the reply has; 0 is none."""
    no_repeat_ngram: int | None = None
    """So many tokens in a row never come twice, the prompt's included; 0 allows it."""
    seed: int = 0
    """Of sampling and of random prompts."""


@dataclass(frozen=True)
class Sampling:
    """How every token is chosen; the default is greedy. ``temperature`` 0 draws nothing, and leaves the penalties."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram: int = 0
    line: str | None = None
    """What a person is told of it; None for plain greedy."""

    @property
    def drawn(self) -> bool:
        """Whether chance chooses."""
        return self.temperature > 0

    def facts(self) -> dict[str, float]:
        """What differs from plain greedy, by key."""
        return {name: value for name in (*WARPERS, *_PENALTIES) if (value := getattr(self, name)) != _NEUTRAL[name]}


_NEUTRAL: Mapping[str, Any] = MappingProxyType({field.name: field.default for field in fields(Sampling)})


def check_sampling(keys: SamplingKeys) -> None:
    """UserError for a value that no token can be chosen by, and for two keys that contradict each other."""
    for name in (*WARPERS, *_PENALTIES):
        if (value := getattr(keys, name)) is not None:
            _check(name, value, name)
    if type(keys.seed) is not int or not 0 <= keys.seed < 2**63:
        raise UserError(f"seed={keys.seed}: must be 0 or more, below 2**63; choose another")
    drawing = [name for name in WARPERS if getattr(keys, name) is not None]
    if keys.greedy and drawing and keys.temperature != 0:
        raise UserError(f"greedy=true and {drawing[0]}={getattr(keys, drawing[0])}: a greedy reply is not drawn; give one of them")
    if keys.greedy is False and keys.temperature == 0:
        raise UserError("greedy=false and temperature=0.0: 0 is greedy; leave one of them out")


def sampling_of(keys: SamplingKeys, generation: object) -> Sampling:
    """``keys`` over ``generation``, which is the checkpoint's ``GenerationConfig``, over transformers' defaults.

    Where tokens are not drawn, nothing of the file counts but its penalties, as in transformers' ``generate(do_sample=False)``. UserError
    for a value of the file that no token can be chosen by.
    """
    drawn = _drawn(keys, generation)
    found, said = {}, {"": [], f" by {FILE}": [], " by transformers": []}  # type: ignore[var-annotated]
    for name in (*WARPERS, *_PENALTIES) if drawn else _PENALTIES:
        given, theirs = getattr(keys, name), getattr(generation, _IN_FILE.get(name, name), None)
        if given is None and theirs is not None:
            _check(name, theirs, f"{FILE}: {_IN_FILE.get(name, name)}")
        usual = {"temperature": 1.0, "top_k": TOP_K}.get(name, _NEUTRAL[name])
        found[name] = next(value for value in (given, theirs, usual) if value is not None)
        source = "" if given is not None else f" by {FILE}" if theirs is not None else " by transformers"
        if found[name] != _NEUTRAL[name]:
            said[source].append(f"{name}={found[name]:g}")
    parts = [f"{' '.join(words)}{source}" for source, words in said.items() if words]
    ignored = [name for name, neutral in _NOT_OBEYED.items() if getattr(generation, name, None) not in (None, neutral)]
    if parts and not drawn:
        parts.insert(0, "greedy")
    if ignored:
        parts.append(f"{FILE}'s {', '.join(ignored)} not obeyed")
    return Sampling(**found, seed=keys.seed, line=f"sampling: {'; '.join(parts)}" if parts else None)


def _drawn(keys: SamplingKeys, generation: object) -> bool:
    if keys.greedy is not None:
        return not keys.greedy
    if keys.temperature is not None:
        return keys.temperature > 0
    return any(getattr(keys, name) is not None for name in WARPERS) or getattr(generation, "do_sample", None) is True


def _check(name: str, value: Any, where: str) -> None:
    allowed, remedy = {
        "temperature": ("0 (greedy) or more", "set it so"),
        "top_k": ("a whole number of 0 (all) or more", "set it so"),
        "top_p": ("above 0 and at most 1", "leave it out to keep all tokens"),
        "min_p": ("0 (all) to 1", "leave it out to keep all tokens"),
        "typical_p": ("above 0 and at most 1", "leave it out to keep all tokens"),
        "repetition_penalty": ("above 0", "leave it out for none"),
        "frequency_penalty": ("a finite number", "leave it out for none"),
        "presence_penalty": ("a finite number", "leave it out for none"),
        "no_repeat_ngram": ("a whole number of 0 (none) or more", "set it so"),
    }[name]
    number = type(value) in (int, float) and math.isfinite(value)
    good = number and {
        "temperature": value >= 0,
        "top_k": value >= 0 and type(value) is int,
        "top_p": 0 < value <= 1,
        "min_p": 0 <= value <= 1,
        "typical_p": 0 < value <= 1,
        "repetition_penalty": value > 0,
        "no_repeat_ngram": value >= 0 and type(value) is int,
    }.get(name, True)
    if not good:
        raise UserError(f"{where}={str(value)[:40]}: must be {allowed}; {remedy}")
