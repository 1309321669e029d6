"""Which passes that verify are recorded: few shapes, each for all chains that are no longer and of no more sequences."""

from __future__ import annotations

from dataclasses import dataclass

MOST_RECORDED = 128
"""Tokens of a recorded pass that verifies. With so many a card's products take what weights take to come out of its memory: below the 165
of an RTX 4090 and the 295 of an H100 (dense BF16 FLOP/s over twice the bytes/s of their data sheets). So a shorter chain costs no more in a
shape that is too wide for it."""
FEWER = 4
"""Sequences of a shape over those of the next one."""


@dataclass(frozen=True)
class VerifyShape:
    """A pass over ``rows`` sequences, each with its last token and drafts: ``tokens`` in all."""

    rows: int
    tokens: int

    @property
    def all_tokens(self) -> int:
        return self.rows * self.tokens


def verify_shapes(rows: int, drafts: int) -> tuple[VerifyShape, ...]:
    """For up to ``drafts`` behind each of up to ``rows`` sequences, most sequences first: all of them, a quarter of them, and so on. Each
    has as many tokens a sequence as :data:`MOST_RECORDED` allow. So they are 1 + log4(rows) at most; passes beyond them are not recorded.
    """
    found: list[VerifyShape] = []
    while rows and drafts:
        tokens = min(drafts + 1, MOST_RECORDED // rows)
        if tokens > 1:
            found.append(VerifyShape(rows, tokens))
        rows //= FEWER
    return tuple(found)
