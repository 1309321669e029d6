"""One pass of a server: which tokens of which rows, and the pages that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens ``start`` to ``start`` + ``count`` of sequence ``number``. ``wanted``: the logits of the last one are asked. ``verify``: the
    newest token and drafts behind it, all of whose logits are asked."""

    number: int
    start: int
    count: int
    kind: Literal["prompt", "decode", "verify"]
    wanted: bool


@dataclass(frozen=True)
class ServeStep:
    """One pass: rows that decode or verify, the oldest first, then prompts."""

    rows: tuple[Share, ...] = ()
    """Empty where nothing is to be done."""
    given_up: tuple[int, ...] = ()
    """Rows that wait again: their pages are released, they are computed from their first token on."""

    @property
    def tokens(self) -> int:
        """That are computed."""
        return sum(share.count for share in self.rows)


class ServePages(Protocol):
    """The pool as the scheduler sees it."""

    @property
    def page_tokens(self) -> int: ...

    @property
    def free(self) -> int:
        """Pages that can be had now. Those that are only kept count as free."""
        ...

    def prefix(self, number: int) -> int:
        """At admission: tokens of its prompt whose pages are shared or restored now. Whole pages, and less than the prompt."""
        ...

    def hold(self, number: int, tokens: int) -> bool:
        """Room for so many tokens of ``number``. False: nothing was taken."""
        ...

    def trim(self, number: int, tokens: int) -> None:
        """It needs no pages beyond those of so many tokens."""
        ...

    def release(self, number: int) -> None:
        """It needs none of its pages any more. Nothing where it has none."""
        ...
