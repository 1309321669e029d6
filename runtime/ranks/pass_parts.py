"""Passes of prompts in parts: a layer computes one behind the other, so that the next rank begins with the first of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import is_
from typing import Any, Protocol

import torch

from penstock.planner.contract.ranks.rank_parts import part_lengths
from penstock.runtime.kv.attention.page_tables import Put
from penstock.runtime.kv.attention.paged_attention import PagedAttention, RowPlaces
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.row_parts import cut
from penstock.runtime.model.rows import Step


class Holds(Protocol):
    """Keeps what is entered while it is ``held``: ``model.binding.Binder`` and ``kv.outside.outside_kv.OutsideKv`` fit."""

    held: bool


class PassParts:
    """Passes with prompts in parts of at most ``tokens`` each, by which ``attention`` attends over ``pool``; 0 leaves them whole.

    A part attends to those before it, as a later pass would. What ``holds`` have of a layer, weights and KV, stays where it is until its
    last part is computed, so it is streamed once a pass. ``put`` brings a part's numbers to the device, once a pass.
    """

    def __init__(self, tokens: int, attention: PagedAttention, pool: KvPool, holds: Sequence[Holds], put: Put):
        self._tokens, self._attention, self._pool, self._holds, self._put = tokens, attention, pool, holds, put
        self._step = Step(())
        self._parts: Sequence[Step] = ()
        self._places: list[RowPlaces] = []
        """Of the parts that a layer of the pass has come to."""
        self.bounds: list[tuple[int, int]] = []
        """Each part's first token and the one behind its last, in the packed input."""
        self._given: list[_Given] = []
        """What layers of a pass were given so far, those that are alike all the same."""

    def begin_pass(self, step: Step) -> None:
        """``step`` comes next, for which attention is ready."""
        self._step, self._parts, self._places = step, (), []
        self._given.clear()
        if self._tokens and step.has_prompt and step.tokens > self._tokens:
            self._parts = step.parts(part_lengths(step.tokens, self._tokens))
        sizes = [part.tokens for part in self._parts] or [step.tokens]
        self.bounds = list(pairwise(accumulate(sizes, initial=0)))

    def given(self, rest: tuple[Any, ...], named: Mapping[str, Any], tokens: int) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
        """What of a layer's arguments belongs to each part of its ``tokens``. Layers are given the same objects: each is cut once a pass,
        for a host takes as long for a cut as for a kernel."""
        for one in self._given:
            if one.is_of(rest, named):
                return one.each(self.bounds, tokens)
        self._given.append(_Given(rest, named, []))
        return self._given[-1].each(self.bounds, tokens)

    def turns(self) -> Iterator[None]:
        """Of one layer: until it is asked for the next one, each part in turn is what is computed."""
        if not self._parts:
            yield
            return
        for number, part in enumerate(self._parts):
            if number == len(self._places):  # in the first layer: the card computes the parts before meanwhile
                self._places.append(self._attention.places_of(part, self._put))
            self._attention.turn_to(self._places[number])
            self._pool.begin_pass(part)
            for one in self._holds:
                one.held = number + 1 < len(self._parts)
            yield
        self._pool.begin_pass(self._step)


@dataclass(frozen=True)
class _Given:
    """A layer's arguments beside its hidden states, and those of the parts that were asked for."""

    rest: tuple[Any, ...]
    named: Mapping[str, Any]
    parts: list[tuple[tuple[Any, ...], Mapping[str, Any]]]

    def each(self, bounds: Sequence[tuple[int, int]], tokens: int) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
        """Of all parts in turn, whose ``bounds`` are within ``tokens``. One is cut when it is computed first: the card has the parts before
        it meanwhile."""
        if len(bounds) == 1:
            yield self.rest, self.named
            return
        for number, (first, end) in enumerate(bounds):
            if number == len(self.parts):
                own = first, end, tokens
                self.parts.append((_cut(self.rest, *own), {name: _cut(value, *own) for name, value in self.named.items()}))
            yield self.parts[number]

    def is_of(self, rest: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
        """Whether these are the very same objects."""
        alike = len(rest) == len(self.rest) and self.named.keys() == named.keys()
        return alike and all(map(is_, rest, self.rest)) and all(map(is_, self.named.values(), map(named.__getitem__, self.named)))


def _cut(value: Any, first: int, end: int, tokens: int) -> Any:
    return cut(value, first, end, tokens) if isinstance(value, torch.Tensor | tuple) else value
