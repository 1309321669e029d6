"""The next token of every row of a pass, each by its own keys: vectorised, with one copy back to the host."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch

from penstock.runtime.asked.sampling_keys import Sampling
from penstock.runtime.engine.passes.sampling import run_of
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


class _Place(NamedTuple):
    """Where a token is chosen."""

    choice: int
    """Of all that choose: whose it is."""
    ahead: int
    """Drafts between what is said and it."""
    row: int
    """Of the logits."""


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
        rows = [range(row, row + 1) for row in range(len(choices))]
        return [run[0] for run in self.pick(self.read(logits), rows, choices, [()] * len(rows))]

    @torch.inference_mode()
    def read(self, logits: torch.Tensor) -> PassLogits:
        """``logits`` [rows, vocab] of a pass, and the likeliest token of each row."""
        best, ids = logits.max(-1)
        found = torch.where(best.isnan(), -1, ids)
        return PassLogits(logits, found, found.tolist())

    @torch.inference_mode()
    def pick(
        self, read: PassLogits, rows: Sequence[Sequence[int]], choices: Sequence[RowChoice], drafts: Sequence[Sequence[int]]
    ) -> list[list[Picked]]:
        """What each of ``choices`` says next, where its ``rows`` of the logits are those behind its last token and behind each of its
        ``drafts``: drafts that it would have chosen, up to the first that it would not, and what it chooses there. All count as said.

        Every token is chosen as without drafts, from the same logits and by the same draws, so that the reply is the same. What is behind a
        draft matters only where that was kept, so all places are chosen at once, each as if all drafts before it were said. A reply with
        a grammar says one token at a time.
        """
        looked = [own[:1] if choice.matcher is not None else own for own, choice in zip(rows, choices, strict=True)]
        places = [_Place(i, ahead, row) for i, own in enumerate(looked) if not choices[i].plain for ahead, row in enumerate(own)]
        errors: dict[int, str] = {}
        self._foresee(looked, choices, drafts)
        blocks = [self._changed(read, some, choices, errors) for some in _blocks(places, len(choices))]
        ids = torch.cat(blocks) if blocks else read.found[:0]
        listed, first = ids.tolist(), 0
        said: list[list[int]] = []
        for i, (own, choice, draft) in enumerate(zip(looked, choices, drafts, strict=True)):
            if choice.plain:
                found, on_device, before = [read.likeliest[row] for row in own], read.found, own[0]
            else:
                found, on_device, before = listed[first : first + len(own)], ids, first
                first += len(own)
            run = run_of(found, draft)
            said.append(run)
            if run[-1] >= 0 and i not in errors:
                try:
                    choice.add(run, on_device[before + len(run) - 1 :][:1])
                except RuntimeError as wrong:
                    errors[i] = str(wrong)
        told = self._logprobs(read.logits, looked, said, choices)
        return [
            [Picked(None if token < 0 else token, told.get((i, k)), errors.get(i)) for k, token in enumerate(run)]
            for i, run in enumerate(said)
        ]

    def _foresee(self, rows: Sequence[Sequence[int]], choices: Sequence[RowChoice], drafts: Sequence[Sequence[int]]) -> None:
        """Bring the drafts to the device that penalties look at, all at once."""
        each = [
            (choice, draft[: len(own) - 1])
            for own, choice, draft in zip(rows, choices, drafts, strict=True)
            if choice.looks_back and len(own) > 1
        ]
        if each:
            there = self._put([token for _, draft in each for token in draft]).split([len(draft) for _, draft in each])
            for (choice, _), own in zip(each, there, strict=True):
                choice.foresee(own)

    def _changed(self, read: PassLogits, places: Sequence[_Place], choices: Sequence[RowChoice], errors: dict[int, str]) -> torch.Tensor:
        """The ids that are chosen at ``places``: [places]; -1 where the logits are no numbers. ``errors`` gets what became of grammars."""
        where = self._put([place.row for place in places])
        scores = read.logits[where].float()
        masks: dict[int, array[int]] = {}
        for i, group in groupby(range(len(places)), key=lambda k: places[k].choice):
            own = list(group)
            choices[i].change(scores[own[0] : own[-1] + 1], places[own[0]].ahead)
            matcher = choices[i].matcher
            if matcher is not None:
                try:
                    masks[own[0]] = matcher.mask()
                except RuntimeError as wrong:
                    errors[i] = str(wrong)
        forbid(scores, masks, self._put)
        chosen = scores.argmax(-1)
        drawn = [(k, choices[place.choice], place.ahead) for k, place in enumerate(places) if choices[place.choice].drawn]
        for some in self._groups(drawn, scores.shape[1]):
            these = self._put([k for k, _, _ in some])
            chances = [choice.chance(ahead) for _, choice, ahead in some]
            chosen[these] = self._draw(scores[these], [choice for _, choice, _ in some], chances)
        return torch.where(read.found[where] < 0, -1, chosen)

    def _groups(self, drawn: Sequence[tuple[int, RowChoice, int]], vocab: int) -> Iterator[Sequence[tuple[int, RowChoice, int]]]:
        """Places that are drawn at once: all that look at a few tokens alone, and some of the others. Those that look at all tokens are
        drawn without order, so beside no others: what a row draws does not depend on its company."""
        whole = [row for row in drawn if _looks_at_all(row[1].sampling, vocab)]
        cut = [row for row in drawn if not _looks_at_all(row[1].sampling, vocab)]
        few = [row for row in cut if 0 < row[1].sampling.top_k <= FEW]
        if few:
            yield few
        yield from _blocks(whole, self._drawn_rows)
        yield from _blocks([row for row in cut if not 0 < row[1].sampling.top_k <= FEW], self._drawn_rows)

    def _draw(self, scores: torch.Tensor, choices: Sequence[RowChoice], chances: Sequence[float]) -> torch.Tensor:
        """One id of each row [rows] from float32 ``scores`` [rows, vocab]: temperature, top_k, top_p, min_p as transformers warps them, in
        this order, then the first token at which the cumulated probability exceeds the row's one of ``chances``."""
        said = [choice.sampling for choice in choices]
        vocab, count = scores.shape[1], len(said)
        keys = [*(s.temperature for s in said), *(s.top_p for s in said), *(s.min_p for s in said), *chances]
        heat, top_p, min_p, chance = floats(self._put, keys).view(4, count, 1).to(scores.dtype)
        scores = scores / heat
        for k, choice in enumerate(choices):
            if choice.typical is not None:
                scores[k] = choice.typical(None, scores[k : k + 1])[0]
        most = max(s.top_k or vocab for s in said)
        if _looks_at_all(said[0], vocab):
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
        self, logits: torch.Tensor, rows: Sequence[Sequence[int]], said: Sequence[Sequence[int]], choices: Sequence[RowChoice]
    ) -> dict[tuple[int, int], TopLogprobs]:
        """Of those that ask for them, by the model's own logits; by who says it and where."""
        told = [choice.told.logprobs for choice in choices]
        asked = [(i, k, rows[i][k], max(0, token)) for i, run in enumerate(said) if told[i] is not None for k, token in enumerate(run)]
        found: dict[tuple[int, int], TopLogprobs] = {}
        for some in _blocks(asked, len(choices)):
            places, ids = self._put([*(row for _, _, row, _ in some), *(token for *_, token in some)]).view(2, -1)
            most = max(told[i] or 0 for i, *_ in some)
            each = in_blocks(logits[places], ids, most, self._block_rows)
            found |= {(i, k): _first(own, told[i] or 0) for (i, k, *_), own in zip(some, each, strict=True)}
        return found


def _looks_at_all(sampling: Sampling, vocab: int) -> bool:
    """Whether each of ``vocab`` tokens may be drawn."""
    return not 0 < sampling.top_k < vocab and sampling.top_p >= 1 and not sampling.min_p


Some = TypeVar("Some")


def _blocks(all: Sequence[Some], count: int) -> Iterator[Sequence[Some]]:
    """``count`` at a time."""
    for first in range(0, len(all), count):
        yield all[first : first + count]


def _first(found: TopLogprobs, count: int) -> TopLogprobs:
    own, ids, logprobs = found
    return own, ids[:count], logprobs[:count]
