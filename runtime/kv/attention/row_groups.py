"""Which rows of a pass one call of attention computes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from penstock.runtime.model.rows import Row, Step


@dataclass(frozen=True)
class Rect:
    """Rows of equal lengths at equal distances in the pool, each in adjacent pages; mostly one row."""

    first: int
    """Its first token in the packed input."""
    rows: int
    tokens: int
    """Of each row in this pass."""
    start: int
    """Of each row, before this pass."""
    base: int
    """Where token 0 of the first row lies in the pool, in tokens."""
    stride: int
    """Tokens of the pool from row to row."""

    @property
    def end(self) -> int:
        """Of each row, after this pass."""
        return self.start + self.tokens


@dataclass(frozen=True)
class Loose:
    """A row for itself; among groups, one whose pages are not adjacent."""

    first: int
    """Its first token in the packed input."""
    row: Row


def packed(step: Step) -> list[Loose]:
    """Each row with its first token in the packed input."""
    firsts = accumulate((len(row.tokens) for row in step.rows), initial=0)
    return [Loose(first, row) for first, row in zip(firsts, step.rows, strict=False)]


def groups_of(step: Step, page_tokens: int) -> list[Rect | Loose]:
    """The rows of ``step`` in their order, equal neighbours in one group. Takes a microsecond or two a row: a step of a hundred waits
    for it."""
    found: list[Rect | Loose] = []
    first = 0
    firsts: list[int] = []
    bases: list[int] = []
    alike: tuple[int, int] | None = None

    def close() -> None:
        if alike is not None:
            stride = bases[1] - bases[0] if len(bases) > 1 else 0
            found.append(Rect(firsts[0], len(bases), *alike, bases[0], stride))

    for row in step.rows:
        base, tokens = _base(row, page_tokens), len(row.tokens)
        if base is None:
            close()
            alike = None
            found.append(Loose(first, row))
        elif alike == (tokens, row.start) and base > bases[-1] and (len(bases) == 1 or base - bases[-1] == bases[1] - bases[0]):
            bases.append(base)
        else:
            close()
            alike, firsts, bases = (tokens, row.start), [first], [base]
        first += tokens
    close()
    return found


def _base(row: Row, page_tokens: int) -> int | None:
    """Where token 0 of a row lies in the pool; None where its pages are not adjacent."""
    needed, pages = -(-row.end // page_tokens), row.pages
    if needed > len(pages):
        raise RuntimeError(f"sequence {row.sequence} holds {len(pages)} pages of KV; {row.end} tokens need {needed}")
    begin = pages[0]
    adjacent = pages[needed - 1] - begin == needed - 1 and pages[:needed] == tuple(range(begin, begin + needed))
    return begin * page_tokens if adjacent else None
