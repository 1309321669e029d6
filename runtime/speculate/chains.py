"""Chains of drafted tokens for the rows of each pass, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from penstock.planner.contract.speculation.acceptance import Acceptance
from penstock.planner.contract.speculation.chain_length import ChainLength
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.speculate.drafter import Drafts, Proposer
from penstock.runtime.speculate.further_drafter import FurtherDrafter


class Lengths(Protocol):
    """Chooses how long chains are, and learns from what became of them."""

    @property
    def acceptance(self) -> Acceptance: ...

    def of(self, rows: int) -> ChainLength:
        """For so many sequences."""


@dataclass
class DraftedSoFar:
    """Counts over all passes that chose a token."""

    passes: int = 0
    rows: int = 0
    """Of all these passes: sequences that each gave tokens to."""
    tokens: int = 0
    """That sequences got."""
    drafted: int = 0
    kept: int = 0
    asked: int = 0
    """Times that a sequence's drafts were asked for, and had room."""
    proposed: int = 0
    """Times that there were any."""
    drafted_at: list[int] = field(default_factory=list)
    """Of the first, second, ... token of a chain: how many were drafted."""
    tried_at: list[int] = field(default_factory=list)
    """Of these, where all before them were kept."""
    kept_at: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    """Seconds of drafting: a part of the passes' seconds."""
    read_s: float = 0.0
    """Seconds in which the drafter read prompts, and what was said while it rested."""


class Chains:
    """Asks ``proposer`` for as many tokens as ``lengths`` choose."""

    def __init__(self, name: str, proposer: Proposer, lengths: Lengths):
        self._name, self._proposer, self.lengths = name, proposer, lengths
        self.counts = DraftedSoFar()
        self._read_s = 0.0
        """Of the pass that is to come."""

    @property
    def watcher(self) -> FurtherDrafter | None:
        """Who must see each pass of the model that is drafted for; None where the drafter reads tokens alone."""
        return self._proposer if isinstance(self._proposer, FurtherDrafter) else None

    def draft(self, live: Sequence[KvSequence], left: Sequence[int]) -> Drafts:
        """Tokens to compute behind the last one of each of ``live``, which may say ``left`` more: fewer than those."""
        most = self.lengths.of(len(live)).choose()
        if not most:
            return [()] * len(live)
        begun = time.perf_counter()
        self._proposer.read(live)
        self._read_s = time.perf_counter() - begun
        rooms = [max(0, min(most, room - 1)) for room in left]
        drafts = self._proposer.propose(live, rooms)
        self.counts.asked += sum(room > 0 for room in rooms)
        self.counts.proposed += sum(len(draft) > 0 for draft in drafts)
        self.counts.read_s += self._read_s
        self.counts.draft_s += time.perf_counter() - begun - self._read_s
        return drafts

    def book(self, drafts: Drafts, said: Sequence[Sequence[int]], seconds: float | None) -> None:
        """The pass of ``drafts`` took ``seconds``, drafting and reading counted, and its sequences said ``said``: what was kept, and one
        token more. None: it carried prompts as well, so that its seconds say nothing of drafts."""
        counts = self.counts
        counts.passes += 1
        for draft, tokens in zip(drafts, said, strict=True):
            kept = len(tokens) - 1
            counts.rows, counts.tokens = counts.rows + 1, counts.tokens + len(tokens)
            counts.drafted, counts.kept = counts.drafted + len(draft), counts.kept + kept
            tried = kept + (kept < len(draft))
            for totals, until in ((counts.drafted_at, len(draft)), (counts.tried_at, tried), (counts.kept_at, kept)):
                totals += [0] * (len(draft) - len(totals))
                for k in range(until):
                    totals[k] += 1
            if draft:
                self.lengths.acceptance.book(len(draft), kept)
        if seconds is not None:
            self.lengths.of(len(drafts)).took(max(map(len, drafts)), seconds - self._read_s)
        self._read_s = 0.0

    def rest(self, number: int) -> None:
        """Sequence ``number`` waits."""
        self._proposer.rest(number)

    def forget(self, number: int) -> None:
        """Sequence ``number`` has ended."""
        self._proposer.forget(number)

    def facts(self) -> dict[str, object]:
        """For the report: tokens drafted and kept, by their places in the chain, and what a pass gave a sequence."""
        counts = self.counts
        a_pass = counts.tokens / counts.rows if counts.rows else None
        return {"drafter": self._name, **asdict(counts), "tokens_a_pass": a_pass, "acceptance": self.lengths.acceptance.share}
