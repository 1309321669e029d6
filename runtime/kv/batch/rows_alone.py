"""Rows of a model that keeps K and V by code of its own: each is computed by the model's whole forward, with the cache of its sequence."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from greenlet import getcurrent, greenlet
from transformers import Cache, DynamicCache, PreTrainedModel

from penstock.planner.common.outside.cache_name import cache_name
from penstock.runtime.model.rows import Row, Step


class Gates(Protocol):
    """Where all rows of a pass must have come before any of them goes on: the begins of streamed units."""

    def open(self, gate: Callable[[], None] | None) -> None:
        """Call ``gate`` there from now on; None: nothing is waited for."""

    def end_pass(self) -> None:
        """All rows have returned."""


class _Held(NamedTuple):
    cache: Any
    """None until the model has made one."""
    tokens: int
    """Of the sequence that have passed."""
    ids: torch.Tensor
    """These tokens, where they may be needed again."""


def keeps_its_own(model: PreTrainedModel) -> bool:
    """Whether ``model`` takes caches of a class of its own alone."""
    defined = vars(sys.modules[type(model).__module__]).values()
    return any(isinstance(c, type) and issubclass(c, Cache) and c.__module__ == type(model).__module__ for c in defined)


class RowsAlone:
    """Computes passes of ``model`` row by row. Rows go in lockstep between ``gates``, so that a unit is streamed once a pass; without
    gates they go one after the other.

    Costs what the caches of the living sequences take on the compute device, which grow by copying. RuntimeError if a row does not
    continue where its sequence's cache is.
    """

    def __init__(self, model: PreTrainedModel, gates: Gates | None = None):
        self._model, self._gates = model, gates
        self._named, self._cache_name = inspect.signature(model.forward).parameters, cache_name(model.forward)
        self._restarts = keeps_its_own(model)
        """Its cache is gone on from by one token alone: several are computed with all before them."""
        self._held: dict[int, _Held] = {}

    def compute(self, step: Step, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` [tokens of the pass] -> the wanted logits [step.wanted, vocab]."""
        made: dict[int, torch.Tensor] = {}
        work, first = [], 0
        for number, row in enumerate(step.rows):
            work.append(self._task(made, number, row, ids[first : first + len(row.tokens)]))
            first += len(row.tokens)
        if self._gates is None or len(work) == 1:
            for task in work:
                task()
        else:
            self._in_lockstep(self._gates, work)
        return torch.cat([made[number] for number in range(len(step.rows))])

    def pretend(self, sequence: int, tokens: int) -> None:
        """Take a fresh cache for that of so many tokens: a rehearsal."""
        self._held[sequence] = _Held(self._fresh(), tokens, torch.zeros(tokens, dtype=torch.long))

    def forget(self, sequence: int) -> None:
        """The sequence has ended."""
        self._held.pop(sequence, None)

    def _task(self, made: dict[int, torch.Tensor], number: int, row: Row, ids: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            made[number] = self._one(row, ids)

        return run

    def _fresh(self) -> Any:
        return None if self._restarts else DynamicCache(config=self._model.config)

    @staticmethod
    def _in_lockstep(gates: Gates, work: list[Callable[[], None]]) -> None:
        """Each in turn as far as the next gate."""
        gates.open(lambda: getcurrent().parent.switch())
        try:
            rows = [greenlet(task) for task in work]
            while rows:
                for row in rows:
                    row.switch()
                rows = [row for row in rows if not row.dead]
        finally:
            gates.open(None)
        gates.end_pass()

    def _one(self, row: Row, ids: torch.Tensor) -> torch.Tensor:
        held = self._held.get(row.sequence) if row.start else None
        if held is None:
            held = _Held(self._fresh(), 0, ids[:0])
        if held.tokens != row.start:
            raise RuntimeError(f"sequence {row.sequence}: its cache has seen {held.tokens} tokens, the row begins at {row.start}")
        cache, start = held.cache, row.start
        if self._restarts:
            held = held._replace(ids=torch.cat([held.ids.to(ids.device), ids]))
            if len(ids) > 1:
                cache, start, ids = self._fresh(), 0, held.ids
        known = {"logits_to_keep": max(1, row.wanted), "position_ids": torch.arange(start, row.end, device=ids.device)[None]}
        extra = {name: value for name, value in known.items() if name in self._named}
        out = self._model(input_ids=ids[None], use_cache=True, **{self._cache_name: cache}, **extra)
        self._held[row.sequence] = _Held(getattr(out, self._cache_name), row.end, held.ids)
        return out.logits[0, out.logits.shape[1] - row.wanted :]
