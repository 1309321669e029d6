"""The next token of every row of a pass, each by its own keys: vectorised, with one copy back to the host."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from penstock.runtime.asked.sampling_keys import Sampling
from penstock.runtime.kv.attention.page_tables import Put
from penstock.runtime.serve.motor.grammars import forbid
from penstock.runtime.serve.motor.logprobs import in_blocks
from penstock.runtime.serve.motor.row_choice import RowChoice, Told, floats
from penstock.runtime.serve.wire.messages import TopLogprobs

FEW = 1024
"""Tokens that a row may choose from for its draw to cost next to nothing."""


class Picked(NamedTuple):
    token: int | None
    """None where the logits are no numbers."""
    logprobs: TopLogprobs | None = None
    error: str | None = None
    """Of the row's own grammar."""


class PassLogits(NamedTuple):
    """Of one pass."""

    logits: torch.Tensor
    """[rows, vocab]"""
    found: torch.Tensor
    """The likeliest token of each row [rows]; -1 where its logits are no numbers."""
    likeliest: list[int]
    """The same on the host."""


class RowSampler:
    """Chooses on the device that computed the logits. ``put`` brings whole numbers there, past the weights.

    A batch of plain greedy rows costs one reduction over [rows, vocab]. Rows that draw, or whose logits are changed, cost their logits in
    float32. Rows that draw without ``top_k`` cost ``DRAWING_BYTES`` a logit beside, ``drawn_rows`` at once; logprobs cost 8 bytes a logit,
    ``block_rows`` at once.
    """

    def __init__(self, put: Put, drawn_rows: int, block_rows: int):
        self._put, self._drawn_rows, self._block_rows = put, drawn_rows, block_rows

    def warm_up(self, logits: torch.Tensor) -> None:
        """Load the kernels that choosing from ``logits`` takes."""
        penalised = Sampling(1.0, top_p=0.5, repetition_penalty=1.1, presence_penalty=1)
        for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=2, min_p=0.1), penalised):
            self.choose(logits, [RowChoice(sampling, Told(logprobs=2), [0], 0, self._put) for _ in range(len(logits))])

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, choices: Sequence[RowChoice]) -> list[Picked]:
        """The next token of each row: [rows, vocab]. Each counts as said."""
        return self.pick(self.read(logits), range(len(choices)), choices)

    @torch.inference_mode()
    def read(self, logits: torch.Tensor) -> PassLogits:
        """``logits`` [rows, vocab] of a pass, and the likeliest token of each row."""
        best, ids = logits.max(-1)
        found = torch.where(best.isnan(), -1, ids)
        return PassLogits(logits, found, found.tolist())

    @torch.inference_mode()
    def pick(self, read: PassLogits, rows: Sequence[int], choices: Sequence[RowChoice]) -> list[Picked]:
        """The next token by each of ``rows`` of the logits, each by its own of ``choices``. Each counts as said."""
        tokens, found = [read.likeliest[row] for row in rows], [read.found[row : row + 1] for row in rows]
        errors: dict[int, str] = {}
        some = [i for i, choice in enumerate(choices) if not choice.plain]
        if some:
            places = self._put([rows[i] for i in some])
            ids = self._changed(read.logits[places].float(), some, choices, errors)
            ids = torch.where(read.found[places] < 0, -1, ids)
            for k, (i, token) in enumerate(zip(some, ids.tolist(), strict=True)):
                tokens[i], found[i] = token, ids[k : k + 1]
        told = self._logprobs(read.logits, rows, tokens, choices)
        picked = []
        for i, (choice, token) in enumerate(zip(choices, tokens, strict=True)):
            error = errors.get(i)
            if token >= 0 and error is None:
                try:
                    choice.add(token, found[i])
                except RuntimeError as wrong:
                    error = str(wrong)
            picked.append(Picked(None if token < 0 else token, told.get(i), error))
        return picked

    def _changed(self, scores: torch.Tensor, some: Sequence[int], choices: Sequence[RowChoice], errors: dict[int, str]) -> torch.Tensor:
        """The ids that ``some`` of ``choices`` choose by their ``scores`` [some, vocab] in float32. ``errors`` gets what became of their
        grammars."""
        masks: dict[int, array[int]] = {}
        for k, i in enumerate(some):
            choices[i].change(scores[k])
            matcher = choices[i].matcher
            if matcher is not None:
                try:
                    masks[k] = matcher.mask()
                except RuntimeError as wrong:
                    errors[i] = str(wrong)
        forbid(scores, masks, self._put)
        chosen = scores.argmax(-1)
        for group in self._groups([(k, choices[i]) for k, i in enumerate(some) if choices[i].drawn]):
            where = self._put([k for k, _ in group])
            chosen[where] = self._draw(scores[where], [choice for _, choice in group])
        return chosen

    def _groups(self, drawn: Sequence[tuple[int, RowChoice]]) -> Iterator[Sequence[tuple[int, RowChoice]]]:
        """Rows that are drawn at once: all that look at a few tokens alone, and some of the others."""
        few = [row for row in drawn if 0 < row[1].sampling.top_k <= FEW]
        if few:
            yield few
        rest = [row for row in drawn if not 0 < row[1].sampling.top_k <= FEW]
        for first in range(0, len(rest), self._drawn_rows):
            yield rest[first : first + self._drawn_rows]

    def _draw(self, scores: torch.Tensor, choices: Sequence[RowChoice]) -> torch.Tensor:
        """One id of each row [rows] from float32 ``scores`` [rows, vocab]: temperature, top_k, top_p, min_p as transformers warps them, in
        this order, then the first token at which the cumulated probability exceeds the row's chance."""
        said = [choice.sampling for choice in choices]
        vocab, count = scores.shape[1], len(said)
        keys = [*(s.temperature for s in said), *(s.top_p for s in said), *(s.min_p for s in said), *(c.draw() for c in choices)]
        heat, top_p, min_p, chance = floats(self._put, keys).view(4, count, 1).to(scores.dtype)
        scores = scores / heat
        for k, choice in enumerate(choices):
            if choice.typical is not None:
                scores[k] = choice.typical(None, scores[k : k + 1])[0]
        most = max(s.top_k or vocab for s in said)
        if most >= vocab and all(s.top_p >= 1 and not s.min_p for s in said):
            order, probs = None, torch.softmax(scores, -1)
        else:
            values, order = scores.topk(min(most, vocab))
            top_k = self._put([min(s.top_k or vocab, vocab) for s in said])[:, None]
            rank = torch.arange(values.shape[1], device=scores.device)
            probs = torch.softmax(values.masked_fill(rank >= top_k, -torch.inf), -1)
            kept = (probs.cumsum(-1) - probs < top_p) & (probs >= min_p * probs[:, :1])
            kept[:, 0] = True
            probs = probs * kept
        cumulated = probs.cumsum(-1)
        place = torch.searchsorted(cumulated, chance * cumulated[:, -1:], right=True)
        last = probs.shape[1] - 1 - (probs > 0).flip(-1).int().argmax(-1, keepdim=True)  # rounding may lead past it
        place = torch.minimum(place, last)
        return (place if order is None else order.gather(1, place))[:, 0]

    def _logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], choices: Sequence[RowChoice]
    ) -> dict[int, TopLogprobs]:
        """Of those that ask for them, by the model's own logits."""
        asked = [i for i, choice in enumerate(choices) if choice.told.logprobs is not None]
        if not asked:
            return {}
        places, ids = self._put([*(rows[i] for i in asked), *(max(0, tokens[i]) for i in asked)]).view(2, -1)
        most = max(choices[i].told.logprobs or 0 for i in asked)
        found = in_blocks(logits[places], ids, most, self._block_rows)
        return {i: _first(own, choices[i].told.logprobs or 0) for i, own in zip(asked, found, strict=True)}


def _first(found: TopLogprobs, count: int) -> TopLogprobs:
    own, ids, logprobs = found
    return own, ids[:count], logprobs[:count]
