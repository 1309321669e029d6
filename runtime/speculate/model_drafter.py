"""Drafts from a model with the same tokens: the likeliest token, and the likeliest behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.model.rows import Row, RowKind, Step
from penstock.runtime.speculate.drafter import Drafts

FEW = 2
"""Tokens that are not computed when a chain begins, where the last pass kept all drafts: the last one of these, and the one behind it."""


class Steps(Protocol):
    """Passes over the weights of the model that drafts."""

    pool: KvPool

    @property
    def recorded(self) -> bool:
        """Whether passes of one token a row cost the host one launch."""

    def run(self, step: Step) -> torch.Tensor:
        """Compute ``step`` -> the wanted logits [step.wanted, vocab] on the device."""

    def forget(self, sequence: int) -> None:
        """``sequence`` has ended."""


@dataclass
class _Followed:
    """A sequence as the drafter has it: what was said, and behind that what was drafted."""

    own: KvSequence
    said: int

    def follow(self, tokens: Sequence[int]) -> None:
        """``tokens`` are said now. K and V hold up to the first that is not what was drafted; those behind it are written over."""
        drafted, new = self.own.tokens[self.said :], tokens[self.said :]
        alike = next((k for k, (one, other) in enumerate(zip(drafted, new, strict=False)) if one != other), min(len(drafted), len(new)))
        self.own.cached = min(self.own.cached, self.said + alike, len(tokens) - 1)
        self.own.tokens[self.said :] = new
        self.said = len(tokens)


class ModelDrafter:
    """Greedy chains of a model that ``steps`` compute: all rows together, a pass for each place in the chain.

    Its K and V follow the sequences: drafts that were not kept are written over, and what was said while it rested is computed as prompts
    are, ``chunk_tokens`` of a row in a pass. Where rows come and go, it reads ``at_once`` tokens before a pass of the model that it drafts
    for, so that no row waits for another's prompt; a row that is not read to its end gets no drafts yet. Tokens from ``vocab`` on one of
    the models does not know: rows that have some get no drafts, as those for which there are no pages.
    """

    def __init__(self, steps: Steps, vocab: int, chunk_tokens: int, at_once: int | None = None):
        self._steps, self._vocab, self._chunk_tokens, self._at_once = steps, vocab, chunk_tokens, at_once
        self._followed: dict[int, _Followed] = {}
        self._foreign: set[int] = set()
        """Rows with tokens that the model does not know."""

    def read(self, rows: Sequence[KvSequence]) -> None:
        for row in rows:
            known = self._followed.setdefault(row.number, _Followed(KvSequence.of(row.number, ()), 0))
            if max(row.tokens[known.said :], default=0) >= self._vocab:
                self._foreign.add(row.number)
            if row.number not in self._foreign:
                known.follow(row.tokens)
        late = [own for own in self._own(rows) if own.left > FEW and own.hold_where_free(self._steps.pool.pages, len(own.tokens))]
        if self._at_once is not None:
            ends = accumulate((own.left - 1 for own in late), initial=0)
            given = [(own, min(own.left - 1, self._at_once - before)) for own, before in zip(late, ends, strict=False)]
            late = []
            if rows_now := [own.row(count, RowKind.prompt, wanted=0) for own, count in given if count > 0]:
                self._run(rows_now)
        while late:
            self._run([own.row(min(self._chunk_tokens, own.left - 1), RowKind.prompt, wanted=0) for own in late])
            late = [own for own in late if own.left > 1]

    def propose(self, rows: Sequence[KvSequence], most: Sequence[int]) -> Drafts:
        drafts: dict[int, list[int]] = {row.number: [] for row in rows}
        rooms = {row.number: room for row, room in zip(rows, most, strict=True)}
        each = ((own, rooms[own.number]) for own in self._own(rows))
        going = [
            own for own, room in each if room and own.left <= FEW and own.hold_where_free(self._steps.pool.pages, len(own.tokens) + room)
        ]
        behind = [own for own in going if own.left > 1] if self._steps.recorded else []
        if behind:
            self._run([own.row(own.left - 1, RowKind.decode) for own in behind])
        while going:
            logits = self._run([own.row(own.left, RowKind.verify if own.left > 1 else RowKind.decode) for own in going])
            for own, token in zip(going, logits[:, : self._vocab].argmax(-1).tolist(), strict=True):
                own.tokens.append(token)
                drafts[own.number].append(token)
            going = [own for own in going if len(drafts[own.number]) < rooms[own.number]]
        return [drafts[row.number] for row in rows]

    def rest(self, number: int) -> None:
        known = self._followed.get(number)
        if known is not None:
            self._steps.forget(number)
            known.own.release(self._steps.pool.pages)

    def forget(self, number: int) -> None:
        self.rest(number)
        self._followed.pop(number, None)
        self._foreign.discard(number)

    def _own(self, rows: Sequence[KvSequence]) -> Iterator[KvSequence]:
        return (self._followed[row.number].own for row in rows if row.number not in self._foreign)

    def _run(self, rows: Sequence[Row]) -> torch.Tensor:
        logits = self._steps.run(Step(tuple(rows)))
        for row in rows:
            self._followed[row.sequence].own.cached = row.end
        return logits
