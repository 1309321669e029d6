"""How the next token of one reply is chosen: what is asked, what it has said, and its own chance."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers.generation.logits_process import LogitsProcessorList, TypicalLogitsWarper

from penstock.runtime.asked.sampling_keys import Sampling
from penstock.runtime.engine.passes.sampling import Change, Penalties
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
        self._chances: deque[float] = deque()
        self._penalties = Penalties(sampling, put(list(prompt))) if Penalties.asked(sampling) else None
        typical = [TypicalLogitsWarper(float(sampling.typical_p))] if self.drawn and sampling.typical_p < 1 else []
        self.typical: Change | None = LogitsProcessorList(typical) if typical else None
        """What looks at the whole distribution and has no vectorised form here."""
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
        return self._penalties is not None or self._biased is not None or self.matcher is not None or self._held_back > 0

    @property
    def looks_back(self) -> bool:
        """Whether what it has said changes its logits."""
        return self._penalties is not None

    @property
    def _held_back(self) -> int:
        """Next tokens that may not be the last one."""
        return 0 if self._stops is None else max(0, self.told.min_tokens - self.said)

    def chance(self, ahead: int) -> float:
        """In [0, 1): its own, of the token behind the ``ahead`` next ones."""
        while len(self._chances) <= ahead:
            self._chances.append(self._chance.random())
        return self._chances[ahead]

    def foresee(self, drafts: torch.Tensor) -> None:
        """``drafts`` [tokens], on the device, may be said next."""
        if self._penalties is not None:
            self._penalties.foresee(drafts)

    def change(self, scores: torch.Tensor, ahead: int = 0) -> None:
        """Penalties, bias and least length, in place: float32 [places, vocab]. The first is behind ``ahead`` of the foreseen tokens, each
        other one behind one more."""
        if self._penalties is not None:
            self._penalties.change(scores, ahead)
        if self._biased is not None and self._bias is not None:
            scores[:, self._biased] += self._bias
        held = max(0, self._held_back - ahead)
        if held and self.matcher is None:
            scores[:held, self._stops] = -torch.inf

    def add(self, tokens: Sequence[int], last: torch.Tensor) -> None:
        """``tokens`` are said: foreseen ones and the one whose id is ``last`` [1], on the device. RuntimeError where its grammar does not
        have them."""
        self.said += len(tokens)
        for _ in range(min(len(tokens), len(self._chances))):
            self._chances.popleft()
        if self.matcher is not None:
            for token in tokens:
                self.matcher.accept(token)
        if self._penalties is not None:
            self._penalties.said(len(tokens) - 1, last)


def floats(put: Put, numbers: Sequence[float]) -> torch.Tensor:
    """``numbers`` on the device, as float64."""
    return put(array("q", array("d", numbers).tobytes())).view(torch.float64)
