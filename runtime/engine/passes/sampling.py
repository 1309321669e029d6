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
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from penstock.planner.common.errors import UserError
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
        self._drawn, self._device = sampling.drawn, device
        self._warpers: Change = LogitsProcessorList(_warpers(sampling))
        looked_at = prompts if Penalties.asked(sampling) else ()
        self._penalties = [Penalties(sampling, torch.tensor(list(prompt), dtype=torch.long, device=device)) for prompt in looked_at]
        numbers = range(first, first + len(prompts)) if self._drawn else ()
        self._chances = [_Chance(torch.Generator(device).manual_seed(seed_of(sampling.seed, k))) for k in numbers]

    def __call__(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """The next token of each of the sequences ``numbers``: [rows, vocab] -> [rows]; -1 where its logits are no numbers. Each counts as
        said."""
        chosen = self._chosen(logits, numbers, [()] * len(numbers))
        for k, token in zip(numbers, chosen.split(1), strict=True):
            self._said(k, 0, token)
        return chosen

    def keep(self, logits: torch.Tensor, numbers: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What each of the sequences ``numbers`` says next, where ``drafts`` were computed behind its last token: those of its drafts that
        it would have chosen, up to the first that it would not, and the token that it chooses there. ``logits`` [tokens, vocab] are those
        behind each sequence's last token and each of its drafts. UserError where they are no numbers.

        Every token is chosen as without drafts, from the same logits and by the same draws. So the text is the same, and where tokens are
        drawn a draft is kept with the probability that the model gives it: no rule keeps more of drafts that were not drawn themselves
        (https://arxiv.org/abs/2211.17192, section 2.3). What is behind a draft matters only where that was kept, so all places are chosen
        at once, each as if all drafts before it were said.
        """
        chosen = self._chosen(logits, numbers, drafts)
        picked: list[int] = chosen.tolist()
        runs, first = [], 0
        for k, draft in zip(numbers, drafts, strict=True):
            run = run_of(picked[first : first + len(draft) + 1], draft)
            refuse_none(run, k)
            last = first + len(run) - 1
            self._said(k, len(run) - 1, chosen[last : last + 1])
            runs.append(run)
            first += len(draft) + 1
        return runs

    def _chosen(self, logits: torch.Tensor, numbers: Sequence[int], drafts: Sequence[Sequence[int]]) -> torch.Tensor:
        """By each row of ``logits`` [places, vocab] -> [places]; -1 where it is no numbers. As many rows at once as there are sequences, so
        that it takes no more memory than without drafts."""
        best, ids = logits.max(-1)
        if not self._penalties and not self._drawn:
            return torch.where(best.isnan(), -1, ids)
        if self._penalties and any(drafts):
            foreseen = torch.tensor([token for draft in drafts for token in draft], dtype=torch.long, device=self._device)
            for k, own in zip(numbers, foreseen.split([len(draft) for draft in drafts]), strict=True):
                self._penalties[k].foresee(own)
        counts = [len(draft) + 1 for draft in drafts]
        chances = torch.cat([self._chances[k].ahead(count) for k, count in zip(numbers, counts, strict=True)]) if self._drawn else None
        firsts = list(accumulate(counts, initial=0))
        chosen, block = [], len(numbers)
        for start in range(0, len(logits), block):
            scores = logits[start : start + block].to(torch.float32, copy=bool(self._penalties))
            for k, first, end in zip(numbers, firsts, firsts[1:], strict=False) if self._penalties else ():
                lo, hi = max(first, start), min(end, start + block)
                if lo < hi:
                    self._penalties[k].change(scores[lo - start : hi - start], lo - first)
            chosen.append(self._found(scores, None if chances is None else chances[start : start + block]))
        return torch.where(best.isfinite(), torch.cat(chosen), -1)

    def _found(self, scores: torch.Tensor, chance: torch.Tensor | None) -> torch.Tensor:
        """The likeliest token, or the first one at which the cumulated probability exceeds ``chance`` [rows]: float32 [rows, vocab] ->
        [rows]."""
        if chance is None:
            return scores.argmax(-1)
        cumulated = torch.softmax(self._warpers(None, scores), -1).cumsum(-1)
        found = torch.searchsorted(cumulated, chance[:, None] * cumulated[:, -1:], right=True)
        return found[:, 0].clamp_(max=scores.shape[-1] - 1)  # where penalties forbid all it is the last one

    def _said(self, number: int, foreseen: int, token: torch.Tensor) -> None:
        """Sequence ``number`` says so many of the tokens that it was foreseen to say, and ``token`` [1]."""
        if self._drawn:
            self._chances[number].used(foreseen + 1)
        if self._penalties:
            self._penalties[number].said(foreseen, token)


def refuse_none(tokens: Sequence[int], number: int) -> None:
    """UserError where one of ``tokens``, which sequence ``number`` would say next, is none: its logits are no numbers."""
    if -1 in tokens:
        raise UserError(
            f"the logits behind prompt {number + 1} are not numbers (NaN) in its reply, so no token follows; the checkpoint is damaged, or "
            f"its numbers exceed its dtype: compare with transformers, and download it again"
        )


def run_of(chosen: Sequence[int], draft: Sequence[int]) -> list[int]:
    """Of the tokens ``chosen`` behind a sequence and behind each token of ``draft``: those that it says."""
    return list(chosen[: 1 + agreeing(chosen, draft)])


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


class Penalties:
    """What the tokens of one sequence do to the logits behind them; ``prompt`` [tokens] is on the device. They grow there: a copy from the
    host would queue behind weights. Takes 8 to 16 bytes a token, and 4 a logit of those that are changed at once."""

    def __init__(self, sampling: Sampling, prompt: torch.Tensor):
        self._sampling, self._ids = sampling, prompt
        self._prompt_tokens = self._count = len(prompt)
        self._ngrams = NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram) if sampling.no_repeat_ngram else None

    @staticmethod
    def asked(sampling: Sampling) -> bool:
        """Whether any is."""
        s = sampling
        return s.repetition_penalty != 1 or bool(s.frequency_penalty or s.presence_penalty or s.no_repeat_ngram)

    def foresee(self, drafts: torch.Tensor) -> None:
        """``drafts`` [tokens] may be said next."""
        self._reserve(self._count + len(drafts))
        self._ids[self._count : self._count + len(drafts)] = drafts

    def said(self, foreseen: int, token: torch.Tensor) -> None:
        """So many of the foreseen tokens, and ``token`` [1] behind them."""
        self._count += foreseen
        self._reserve(self._count + 1)
        self._ids[self._count] = token[0]
        self._count += 1

    def change(self, scores: torch.Tensor, ahead: int = 0) -> None:
        """In place, float32 [places, vocab]: the first is behind ``ahead`` of the foreseen tokens, each other one behind one more. In the
        order of transformers' ``generate``; what that does not know comes last:

        ``frequency * n + presence * (n > 0)``, where the reply has the token n times (OpenAI,
        https://platform.openai.com/docs/api-reference/chat/create).
        """
        s, first, places = self._sampling, self._count + ahead, len(scores)
        ids = self._ids[: first + places - 1]
        if s.repetition_penalty != 1:
            own = scores[:, ids]
            changed = torch.where(own < 0, own * s.repetition_penalty, own / s.repetition_penalty)
            scores[:, ids] = changed if places == 1 else torch.where(_occurred(ids, first, places), changed, own)
        if self._ngrams is not None:
            for k in range(places):
                scores[k] = self._ngrams(ids[None, : first + k], scores[k : k + 1])[0]
        if s.frequency_penalty or s.presence_penalty:
            reply, later = ids[self._prompt_tokens : first], ids[first:]
            counts = torch.zeros_like(scores[0]).scatter_add_(0, reply, torch.ones_like(reply, dtype=scores.dtype)).repeat(places, 1)
            if places > 1:
                counts.scatter_add_(1, later.expand(places, -1), torch.ones(places, places - 1, device=scores.device).tril(-1))
            scores.sub_(counts, alpha=s.frequency_penalty)
            scores.sub_(counts.clamp_(max=1), alpha=s.presence_penalty)

    def _reserve(self, tokens: int) -> None:
        if tokens > len(self._ids):
            self._ids = torch.cat([self._ids, self._ids.new_zeros(max(len(self._ids), tokens - len(self._ids)))])


def _occurred(ids: torch.Tensor, first: int, places: int) -> torch.Tensor:
    """Whether each token of ``ids`` [tokens] is among the first ``first``, ``first + 1``, ... of them: [places, tokens]."""
    since = (ids[None, :] == ids[first:, None]).int().argmax(-1)  # of several the first
    began = torch.cat([torch.zeros(first, dtype=torch.long, device=ids.device), since])
    return began < torch.arange(first, first + places, device=ids.device)[:, None]


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
