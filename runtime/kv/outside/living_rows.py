"""Which bytes of a layer's pages pass through a stream: those that attention will read come in, those that were computed go out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.runtime.kv.batch.kv_windows import first_seen
from penstock.runtime.kv.batch.page_spans import spans
from penstock.runtime.model.rows import Row, Step

Spans = tuple[tuple[int, int], ...]
"""(begin, end) in bytes of a layer's buffer, ascending, apart."""


class _Lived(NamedTuple):
    pages: tuple[int, ...]
    tokens: int


class LivingRows:
    """The tokens of every sequence that was computed and has not ended. ``windows`` say how many of the last ones each layer's attention
    sees."""

    def __init__(self, page_tokens: int, windows: Mapping[int, int | None]):
        self._page_tokens, self._windows = page_tokens, windows
        self._lived: dict[int, _Lived] = {}
        self._step = Step(())
        self._known: dict[tuple[int | None, int], Spans] = {}
        self._new: dict[int, Spans] = {}

    def follow(self, step: Step) -> bool:
        """``step`` comes next: until :meth:`compute`, ``wanted`` is what its rows read. False where some of that was not wanted before,
        and where all that was wanted has ended: a stream then begins anew."""
        known = bool(self._lived) and all(self._is_known(row) for row in step.rows)
        self._step = step
        self._new.clear()
        self._note({row.sequence: _Lived(row.pages, row.start) for row in step.rows})
        return known

    def compute(self) -> None:
        """From now on ``wanted`` is what the pass after this one reads."""
        self._note({row.sequence: _Lived(row.pages, row.end) for row in self._step.rows})

    def forget(self, sequence: int) -> None:
        """It has ended."""
        self._lived.pop(sequence, None)
        self._known.clear()

    def wanted(self, layer: int, token_bytes: int) -> Spans:
        """What a visit of ``layer`` reads."""
        key = self._windows[layer], token_bytes
        if key not in self._known:
            lived = self._lived.values()
            found = (spans(s.pages, first_seen(s.tokens, key[0]), s.tokens, self._page_tokens, token_bytes) for s in lived)
            self._known[key] = united(span for part in found for span in part)
        return self._known[key]

    def new(self, token_bytes: int) -> Spans:
        """What the pass in progress computes in a layer."""
        if token_bytes not in self._new:
            found = (spans(row.pages, row.start, row.end, self._page_tokens, token_bytes) for row in self._step.rows)
            self._new[token_bytes] = united(span for part in found for span in part)
        return self._new[token_bytes]

    def _note(self, lived: Mapping[int, _Lived]) -> None:
        self._lived |= lived
        self._known.clear()

    def _is_known(self, row: Row) -> bool:
        lived, held = self._lived.get(row.sequence), -(-row.start // self._page_tokens)
        return not row.start or (lived is not None and row.start <= lived.tokens and row.pages[:held] == lived.pages[:held])


def united(parts: Iterable[tuple[int, int]]) -> Spans:
    """``parts`` in ascending order, those that touch or overlap as one."""
    out: list[tuple[int, int]] = []
    for begin, end in sorted(parts):
        if out and begin <= out[-1][1]:
            begin, end = out[-1][0], max(end, out.pop()[1])
        out.append((begin, end))
    return tuple(out)
