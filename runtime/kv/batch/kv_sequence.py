"""A sequence while it lives: its tokens, how many of them lie in the pool, and in which pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.runtime.kv.batch.page_pool import PagePool
from penstock.runtime.model.rows import Row, RowKind


@dataclass(eq=False)
class KvSequence:
    """``tokens`` are the prompt and its reply so far. Holds one reference on each of its ``pages``."""

    number: int
    tokens: list[int]
    prompt_tokens: int
    cached: int = 0
    """Tokens whose K and V lie in ``pages``."""
    pages: list[int] = field(default_factory=list)
    salt: str = ""
    """Sequences of one salt alone share pages."""

    @classmethod
    def of(cls, number: int, prompt: Sequence[int], salt: str = "") -> KvSequence:
        """Nothing of it is computed yet."""
        return cls(number, list(prompt), len(prompt), salt=salt)

    @property
    def left(self) -> int:
        """Tokens that are to be computed."""
        return len(self.tokens) - self.cached

    def hold(self, pool: PagePool, tokens: int) -> None:
        """Take pages until ``tokens`` fit. RuntimeError where the pool has too few."""
        missing = -(-tokens // pool.page_tokens) - len(self.pages)
        if missing > 0:
            self.pages += pool.take(missing, self.pages[-1] if self.pages else None)

    def hold_where_free(self, pool: PagePool, tokens: int) -> bool:
        """The same where the pool has as many pages free; else False, and nothing is taken."""
        if -(-tokens // pool.page_tokens) - len(self.pages) > pool.free:
            return False
        self.hold(pool, tokens)
        return True

    def trim(self, pool: PagePool, tokens: int) -> None:
        """Give pages beyond those of ``tokens`` back."""
        needed = -(-tokens // pool.page_tokens)
        pool.release(self.pages[needed:])
        del self.pages[needed:]

    def release(self, pool: PagePool) -> None:
        """Give the pages back."""
        pool.release(self.pages)
        self.pages, self.cached = [], 0

    def row(self, count: int, kind: RowKind, wanted: int = 1) -> Row:
        """The next ``count`` tokens that are to be computed."""
        tokens = tuple(self.tokens[self.cached : self.cached + count])
        return Row(self.number, tokens, self.cached, tuple(self.pages), kind, wanted)

    def drafted(self, drafts: Sequence[int]) -> Row:
        """The token that was chosen last and ``drafts`` behind it, all logits wanted; the sequence itself does not change."""
        tokens = (*self.tokens[self.cached :], *drafts)
        return Row(self.number, tokens, self.cached, tuple(self.pages), RowKind.verify, len(tokens))


class PrefixCache(Protocol):
    """Where the K and V of prompts' beginnings may come from. One batch at a time."""

    def restore(self, sequences: Sequence[KvSequence]) -> None:
        """Give each of ``sequences``, which hold no pages, the pages of its prefix. ``cached`` says how many tokens that is: whole pages,
        and less than the prompt."""

    def confirm(self) -> None:
        """What was restored is checked now; ``cached`` of a sequence is less where it was no good, and what was computed since is void."""

    def keep(self, sequences: Sequence[KvSequence]) -> None:
        """The full pages of these sequences' cached tokens may be kept."""

    def advance(self) -> None:
        """Queue copies of some kept pages, as many as need no waiting."""

    def finish(self) -> None:
        """Copy out what ``advance`` has not come to."""
