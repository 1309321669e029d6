"""How the next token of one reply is chosen: what is asked, what it has said, and its own chance."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers.generation.logits_process import LogitsProcessorList, NoRepeatNGramLogitsProcessor, TypicalLogitsWarper

from penstock.runtime.asked.sampling_keys import Sampling
from penstock.runtime.engine.sampling import Change
from penstock.runtime.kv.attention.page_tables import Put
from penstock.runtime.serve.motor.grammars import Matcher


@dataclass(frozen=True)
class Told:
    """What a request says of its tokens beside ``Sampling``."""

    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None
    bias: Mapping[int, float] = field(default_factory=dict)


class RowChoice:
    """Of one reply to a prompt. ``seed`` is its own: what it draws does not depend on who is beside it. A reply that was given up goes on
    as it would have.

    Costs 8 to 16 bytes of the device a token, where penalties look back.
    """

    def __init__(self, sampling: Sampling, told: Told, prompt: Sequence[int], seed: int, put: Put, matcher: Matcher | None = None):
        self.sampling, self.told, self.matcher = sampling, told, matcher
        self._chance = random.Random(seed)
        self._prompt_tokens = len(prompt)
        self._count = 0
        self._history: torch.Tensor | None = None
        self._ngrams = NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram) if sampling.no_repeat_ngram else None
        typical = [TypicalLogitsWarper(float(sampling.typical_p))] if self.drawn and sampling.typical_p < 1 else []
        self.typical: Change | None = LogitsProcessorList(typical) if typical else None
        """What looks at the whole distribution and has no vectorised form here."""
        if self._penalised:
            self._history, self._count = put(list(prompt)), len(prompt)
        bias = dict(told.bias)
        self._biased = put(list(bias)) if bias else None
        self._bias = floats(put, list(bias.values())).float() if bias else None
        self._stops = put(sorted(told.stop_ids)) if told.min_tokens and told.stop_ids else None
        self.said = 0
        """Tokens of the reply so far."""

    @property
    def drawn(self) -> bool:
        """Whether chance chooses."""
        return self.sampling.drawn

    @property
    def plain(self) -> bool:
        """Whether its next token is the likeliest of the model's own logits."""
        return not (self.drawn or self.changes)

    @property
    def changes(self) -> bool:
        """Whether logits are changed before one is chosen."""
        return self._penalised or self._biased is not None or self.matcher is not None or self._held_back

    @property
    def _penalised(self) -> bool:
        s = self.sampling
        return s.repetition_penalty != 1 or bool(s.frequency_penalty or s.presence_penalty or s.no_repeat_ngram)

    @property
    def _held_back(self) -> bool:
        """Whether it may not stop yet."""
        return self._stops is not None and self.said < self.told.min_tokens

    def draw(self) -> float:
        """The next number of its own chance, in [0, 1)."""
        return self._chance.random()

    def change(self, scores: torch.Tensor) -> None:
        """Penalties, bias and least length, in place: float32 [vocab]. In the order of transformers' ``generate``; what that does not know
        comes last."""
        s = self.sampling
        if self._history is not None:
            ids = self._history[: self._count]
            if s.repetition_penalty != 1:
                own = scores[ids]
                scores[ids] = torch.where(own < 0, own * s.repetition_penalty, own / s.repetition_penalty)
            if self._ngrams is not None:
                scores.copy_(self._ngrams(ids[None], scores[None])[0])
            if s.frequency_penalty or s.presence_penalty:
                # OpenAI: frequency * n + presence * (n > 0), where the reply has the token n times
                said = ids[self._prompt_tokens :]
                counts = torch.zeros_like(scores).scatter_add_(0, said, torch.ones_like(said, dtype=scores.dtype))
                scores -= s.frequency_penalty * counts + s.presence_penalty * (counts > 0)
        if self._biased is not None and self._bias is not None:
            scores[self._biased] += self._bias
        if self._held_back and self.matcher is None:
            scores[self._stops] = -torch.inf

    def add(self, token: int, on_device: torch.Tensor) -> None:
        """``token``, whose id is ``on_device`` [1], is said. RuntimeError where its grammar does not have it."""
        self.said += 1
        if self.matcher is not None:
            self.matcher.accept(token)
        if self._history is not None:
            if self._count == len(self._history):
                self._history = torch.cat([self._history, torch.zeros_like(self._history), on_device])
            self._history[self._count] = on_device[0]
            self._count += 1


def floats(put: Put, numbers: Sequence[float]) -> torch.Tensor:
    """``numbers`` on the device, as float64."""
    return put(array("q", array("d", numbers).tobytes())).view(torch.float64)
