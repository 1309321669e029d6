"""What one pass over the weights computes: rows, each some tokens of one sequence. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class RowKind(StrEnum):
    """What a row's tokens are."""

    prompt = "prompt"
    decode = "decode"
    """The token that was chosen last."""
    verify = "verify"
    """That token and drafts behind it."""


@dataclass(frozen=True)
class Row:
    """Tokens of one sequence that are computed in one pass."""

    sequence: int
    """Number of the sequence, unique among those that live."""
    tokens: tuple[int, ...]
    start: int
    """Tokens of the sequence before these; their K and V lie in ``pages``."""
    pages: tuple[int, ...]
    """Pages of the pool that the sequence holds, in its order: token t lies in ``pages[t // page_tokens]``."""
    kind: RowKind
    wanted: int = 1
    """Last tokens whose logits are wanted."""

    @property
    def end(self) -> int:
        """Tokens of the sequence after the pass."""
        return self.start + len(self.tokens)

    def cut(self, first: int, end: int) -> Row:
        """Its tokens from ``first`` to before ``end``; logits are wanted of those of them of which the row wants some."""
        wanted = max(0, end - max(first, len(self.tokens) - self.wanted))
        return replace(self, tokens=self.tokens[first:end], start=self.start + first, wanted=wanted)


@dataclass(frozen=True)
class Step:
    """The rows of one pass, packed one after the other."""

    rows: tuple[Row, ...]
    ends: bool = False
    """Whether it is known that no decode step follows: what comes next is a prompt, or nothing."""
    schedule: int | None = None
    """Number of the recorded schedule that all ranks follow; None: whoever computes it chooses."""

    @property
    def tokens(self) -> int:
        """Token rows that the pass computes."""
        return sum(len(row.tokens) for row in self.rows)

    def parts(self, lengths: Sequence[int]) -> tuple[Step, ...]:
        """The same rows in steps of so many tokens each: a row that is cut goes on in the next step."""
        found: list[list[Row]] = []
        coming, room = iter(lengths), 0
        for row in self.rows:
            first = 0
            while first < len(row.tokens):
                if not room:
                    found.append([])
                    room = next(coming)
                end = min(len(row.tokens), first + room)
                found[-1].append(row.cut(first, end))
                room, first = room - (end - first), end
        return tuple(Step(tuple(rows)) for rows in found)

    @property
    def wanted(self) -> int:
        """Logits that the pass gives."""
        return sum(row.wanted for row in self.rows)

    @property
    def has_prompt(self) -> bool:
        """Whether expert policies treat the pass as one of prompts. A prompt's pass over one token counts as a step, as in a simulation."""
        return any(row.kind is RowKind.prompt and len(row.tokens) > 1 for row in self.rows)
