"""Passes of prompts in parts: a layer computes one behind the other, so that the next rank begins with the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch

from penstock.runtime.kv.attention.page_tables import Put
from penstock.runtime.kv.attention.paged_attention import PagedAttention, RowPlaces
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.row_parts import cut
from penstock.runtime.model.rows import Step


class Holds(Protocol):
    """Keeps units entered while it is ``held``: ``model.binding.Binder`` fits."""

    held: bool


class PassParts:
    """Passes with prompts in parts of ``tokens`` each, by which ``attention`` attends over ``pool``; 0 leaves them whole.

    A part attends to those before it, as a later pass would. A layer's weights stay where they are until its last part is computed, so they
    are streamed once a pass. ``put`` brings a part's numbers to the device, once a pass.
    """

    def __init__(self, tokens: int, attention: PagedAttention, pool: KvPool, units: Holds, put: Put):
        self._tokens, self._attention, self._pool, self._units, self._put = tokens, attention, pool, units, put
        self._step = Step(())
        self._parts: list[tuple[Step, RowPlaces]] = []
        self._cut: dict[tuple[int, int], tuple[Any, Any]] = {}
        """What all layers of a pass are given alike, and its parts: (of which object, first token) -> both."""

    def begin_pass(self, step: Step) -> None:
        """``step`` comes next, for which attention is ready."""
        self._step, self._parts = step, []
        self._cut.clear()
        if self._tokens and step.has_prompt and step.tokens > self._tokens:
            self._parts = [(part, self._attention.places_of(part, self._put)) for part in step.parts(self._tokens)]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Each part's first token and the one behind its last, in the packed input."""
        sizes = [part.tokens for part, _ in self._parts] or [self._step.tokens]
        return list(pairwise(accumulate(sizes, initial=0)))

    def cut(self, value: Any, first: int, end: int, tokens: int) -> Any:
        """What of ``value`` belongs to the part of tokens ``first`` to ``end`` of ``tokens``. Layers are given the same objects: each
        is cut once a pass, for a host takes as long for a cut as for a kernel."""
        if not isinstance(value, torch.Tensor | tuple):
            return value
        kept = self._cut.get((id(value), first))
        if kept is None or kept[0] is not value:
            kept = self._cut[id(value), first] = value, cut(value, first, end, tokens)
        return kept[1]

    def turns(self) -> Iterator[None]:
        """Of one layer: until it is asked for the next one, each part in turn is what is computed."""
        if not self._parts:
            yield
            return
        for number, (part, places) in enumerate(self._parts, 1):
            self._attention.turn_to(places)
            self._pool.begin_pass(part)
            self._units.held = number < len(self._parts)
            yield
        self._pool.begin_pass(self._step)
