"""How often drafted tokens are kept, learnt while they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.planner.contract.speculation.drafting import expected_tokens

MEMORY = 256.0
"""Drafted tokens that count: text changes, and what was learnt of the last paragraph says most of the next."""
ALIKE = 32.0
"""Tokens at one place of a chain that say as much of it as all the others do."""


@dataclass
class Place:
    """Of a chain: tokens that were tried there, and kept."""

    tried: float = 0.0
    kept: float = 0.0

    def book(self, right: bool) -> None:
        """One more; what is old counts less and less."""
        fading = min(1.0, MEMORY / (self.tried + 1))
        self.tried, self.kept = (self.tried + 1) * fading, (self.kept + right) * fading


@dataclass
class Acceptance:
    """The share of drafted tokens that are right, of those whose forerunners were. ``tried`` tokens with the share ``share`` are what is
    known at first; ``at``: shares of the first, second, ... token of a chain, where they are known to differ."""

    share: float
    tried: float = 8.0
    at: tuple[float, ...] = ()
    _places: list[Place] = field(default_factory=list)

    def book(self, drafted: int, kept: int) -> None:
        """A chain of ``drafted`` tokens, of which the first ``kept`` were right: the next one was tried, those behind it were not."""
        tried = kept + (kept < drafted)
        if not tried:
            return
        total = self.tried + tried
        self.share = (self.share * self.tried + kept) / total
        self.tried = min(total, MEMORY)
        self._places += [Place() for _ in range(tried - len(self._places))]
        for k, place in enumerate(self._places[:tried]):
            place.book(k < kept)

    @property
    def places(self) -> tuple[float, ...]:
        """Shares of the first, second, ... token of a chain, as far as any is known; all others are as likely as ``share`` says."""
        return tuple(self._place(k) for k in range(max(len(self.at), len(self._places))))

    def expected(self, drafts: int) -> float:
        """Tokens that a pass gives a sequence on average."""
        return expected_tokens(self.share, drafts, self.places)

    def _place(self, k: int) -> float:
        first = self.at[k] if k < len(self.at) else self.share
        own = self._places[k] if k < len(self._places) else Place()
        return (first * ALIKE + own.kept) / (ALIKE + own.tried)
