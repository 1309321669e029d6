"""Which token comes next: transformers' own logits processors and warpers, and the draw."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from penstock.runtime.asked.sampling_keys import Sampling

__all__ = ["Choice", "Sampler", "Sampling"]

Change = Callable[[Any, torch.Tensor], torch.Tensor]
"""(token ids [rows, tokens], scores [rows, vocab]) -> scores."""


class Sampler:
    """Chooses the tokens of one batch after another, on the device that computed the logits.

    Sequence k of those that it has begun is drawn by ``sampling.seed`` and k alone, so a reply does not depend on who is beside it.
    """

    def __init__(self, sampling: Sampling, device: torch.device):
        self._sampling, self._device = sampling, device
        self._begun = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> Choice:
        """For the sequences that begin with ``prompts``, numbered in this order."""
        choice = Choice(self._sampling, self._device, prompts, self._begun)
        self._begun += len(prompts)
        return choice

    def warm_up(self, logits: torch.Tensor) -> None:
        """Load the kernels that choosing from ``logits`` takes; what is drawn later does not depend on it."""
        rows = range(len(logits))
        choice = Choice(self._sampling, self._device, [[0]] * len(rows), 0)
        for _ in range(2):
            choice(logits, rows)


class Choice:
    """How the tokens of one batch are chosen. Takes 16 bytes a token of each sequence where penalties look back, and the logits in float32
    where anything but the likeliest token is asked for."""

    def __init__(self, sampling: Sampling, device: torch.device, prompts: Sequence[Sequence[int]], first: int):
        self._drawn = sampling.drawn
        self._warpers: Change = LogitsProcessorList(_warpers(sampling))
        penalties = [LogitsProcessorList(_penalties(sampling, len(prompt))) for prompt in prompts]
        self._penalties: list[Change] | None = [*penalties] if any(penalties) else None
        self._said = [_History(prompt, device) for prompt in prompts] if self._penalties else []
        numbers = range(first, first + len(prompts)) if self._drawn else ()
        self._chances = [_Chance(torch.Generator(device).manual_seed(seed_of(sampling.seed, k))) for k in numbers]

    def __call__(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """The next token of each of the sequences ``numbers``: [rows, vocab] -> [rows]. Each counts as said."""
        if self._penalties is None and not self._drawn:
            return logits.argmax(-1)
        scores = logits.float()
        if self._penalties is not None:
            each = zip(scores.split(1), numbers, strict=True)
            scores = torch.cat([self._penalties[k](self._said[k].ids, row) for row, k in each])
        if self._drawn:
            chosen = self._draw(scores, torch.cat([self._chances[k].ahead(1) for k in numbers]))
            for k in numbers:
                self._chances[k].used(1)
        else:
            chosen = scores.argmax(-1)
        if self._said:
            for token, k in zip(chosen.split(1), numbers, strict=True):
                self._said[k].add(token)
        return chosen

    def keep(self, logits: torch.Tensor, numbers: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What each of the sequences ``numbers`` says next, where ``drafts`` were computed behind its last token: those of its drafts that
        it would have chosen, up to the first that it would not, and the token that it chooses there. ``logits`` [tokens, vocab] are those
        behind each sequence's last token and each of its drafts.

        Every token is chosen as without drafts, from the same logits and by the same draws. So the text is the same, and where tokens are
        drawn a draft is kept with the probability that the model gives it: no rule keeps more of drafts that were not drawn themselves
        (https://arxiv.org/abs/2211.17192, section 2.3).
        """
        firsts = list(accumulate((len(draft) + 1 for draft in drafts), initial=0))[:-1]
        if self._penalties is None and not self._drawn:
            picked: list[int] = logits.argmax(-1).tolist()
            runs = [picked[first : first + len(draft) + 1] for first, draft in zip(firsts, drafts, strict=True)]
            return [run[: 1 + agreeing(run, draft)] for run, draft in zip(runs, drafts, strict=True)]
        if self._penalties is None:
            return self._drawn_runs(logits, numbers, drafts, firsts)
        said: list[list[int]] = [[] for _ in numbers]
        going = list(range(len(numbers)))
        while going:
            rows = torch.tensor([firsts[k] + len(said[k]) for k in going], device=logits.device)
            for k, token in zip(going, self(logits[rows], [numbers[k] for k in going]).tolist(), strict=True):
                said[k].append(token)
            going = [k for k in going if len(said[k]) <= len(drafts[k]) and said[k][-1] == drafts[k][len(said[k]) - 1]]
        return said

    def _drawn_runs(
        self, logits: torch.Tensor, numbers: Sequence[int], drafts: Sequence[Sequence[int]], firsts: Sequence[int]
    ) -> list[list[int]]:
        """``keep`` where every place's distribution is known beforehand: all places are drawn, and what lies behind a draft that was not
        kept is drawn again. As many rows at once as there are sequences, so that it takes no more memory than without drafts."""
        chances = torch.cat([self._chances[k].ahead(len(draft) + 1) for k, draft in zip(numbers, drafts, strict=True)])
        parts = zip(logits.split(len(numbers)), chances.split(len(numbers)), strict=True)
        picked: list[int] = torch.cat([self._draw(part.float(), chance) for part, chance in parts]).tolist()
        runs = []
        for k, draft, first in zip(numbers, drafts, firsts, strict=True):
            run = picked[first : first + len(draft) + 1]
            runs.append(run[: 1 + agreeing(run, draft)])
            self._chances[k].used(len(runs[-1]))
        return runs

    def _draw(self, scores: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        """The first token at which the cumulated probability exceeds ``chance`` [rows]: float32 [rows, vocab] -> [rows]. Of logits that are
        no numbers it is the last token."""
        cumulated = torch.softmax(self._warpers(None, scores), -1).cumsum(-1)
        found = torch.searchsorted(cumulated, chance[:, None] * cumulated[:, -1:], right=True)
        return found[:, 0].clamp_(max=scores.shape[-1] - 1)


def agreeing(chosen: Sequence[int], draft: Sequence[int]) -> int:
    """Tokens of ``draft`` that were chosen, from its first one on."""
    pairs = zip(chosen, draft, strict=False)
    return next((k for k, (own, drafted) in enumerate(pairs) if own != drafted), min(len(chosen), len(draft)))


class _Chance:
    """The chances of one sequence, in [0, 1): the k-th belongs to its k-th token, however many were looked at before. They are made on the
    device, since a copy from the host would queue behind weights. Takes ``BLOCK`` * 4 bytes, twice where a chain is as long."""

    BLOCK = 64

    def __init__(self, generator: torch.Generator):
        self._generator = generator
        self._made = self._more()
        self._used = 0

    def _more(self) -> torch.Tensor:
        return torch.rand(self.BLOCK, generator=self._generator, device=self._generator.device)

    def ahead(self, count: int) -> torch.Tensor:
        """The next ones [count]; they stay the next ones."""
        while len(self._made) - self._used < count:
            self._made, self._used = torch.cat([self._made[self._used :], self._more()]), 0
        return self._made[self._used : self._used + count]

    def used(self, count: int) -> None:
        """So many tokens were said."""
        self._used += count


class _History:
    """The token ids of one sequence on the device. They grow there: a copy from the host would queue behind weights."""

    def __init__(self, prompt: Sequence[int], device: torch.device):
        self._room = torch.tensor(list(prompt), dtype=torch.long, device=device)
        self._count = len(prompt)

    @property
    def ids(self) -> torch.Tensor:
        """[1, tokens]"""
        return self._room[None, : self._count]

    def add(self, token: torch.Tensor) -> None:
        if self._count == len(self._room):
            self._room = torch.cat([self._room, torch.zeros_like(self._room), token])
        self._room[self._count] = token[0]
        self._count += 1


class CountPenalty(LogitsProcessor):
    """Lowers the logit of token t by ``frequency * n + presence * (n > 0)``, where the reply has t n times: the penalties of OpenAI's API
    (https://platform.openai.com/docs/api-reference/chat/create), which transformers has no processor for."""

    def __init__(self, frequency: float, presence: float, prompt_tokens: int):
        self._frequency, self._presence, self._prompt_tokens = frequency, presence, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[rows, tokens], [rows, vocab] -> [rows, vocab]"""
        said = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, said, torch.ones_like(said, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def _penalties(sampling: Sampling, prompt_tokens: int) -> Iterator[LogitsProcessor]:
    """What looks at a sequence's tokens, in the order of transformers' ``generate``; what it does not know comes last there, too."""
    if sampling.repetition_penalty != 1:
        yield RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
    if sampling.no_repeat_ngram:
        yield NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram)
    if sampling.frequency_penalty or sampling.presence_penalty:
        yield CountPenalty(sampling.frequency_penalty, sampling.presence_penalty, prompt_tokens)


def _warpers(sampling: Sampling) -> Iterator[LogitsProcessor]:
    """What looks at the logits alone, in the order of transformers' ``generate``."""
    if not sampling.drawn:
        return
    if sampling.temperature != 1:
        yield TemperatureLogitsWarper(float(sampling.temperature))
    if sampling.top_k:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1:
        yield TopPLogitsWarper(float(sampling.top_p))
    if sampling.min_p:
        yield MinPLogitsWarper(float(sampling.min_p))
    if sampling.typical_p < 1:
        yield TypicalLogitsWarper(float(sampling.typical_p))


def seed_of(seed: int, number: int) -> int:
    """Of sequence ``number``. The first one has the seed itself; those of neighbouring seeds have nothing in common."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()) >> 1
