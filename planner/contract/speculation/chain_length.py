"""How many tokens are drafted for each sequence of the next pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.planner.contract.speculation.acceptance import Acceptance

TRIALS = 0.005
"""Share of the time that is spent on trying what seems not to pay: text changes, and so does the machine."""
WEIGHT = 0.25
"""Of the newest measured pass beside those before."""


def best_length(most: int, worth: Callable[[int], float]) -> int:
    """Of 0 to ``most`` drafts what is worth most; the shorter of equals."""
    return max(range(most + 1), key=lambda drafts: (worth(drafts), -drafts))


@dataclass
class ChainLength:
    """Chooses the chain that gives the most tokens a second, by what was accepted and what passes took.

    ``planned(k)`` is what the plan says that a pass takes with ``k`` drafted tokens a sequence. The first pass has none, so that two
    measured ones soon stand beside each other.
    """

    most: int
    planned: Callable[[int], float]
    acceptance: Acceptance
    measured: dict[int, float] = field(default_factory=dict)
    _since_trial_s: float = 0.0
    _longer: bool = False
    """Whether a longer chain is tried next, or none."""

    def of(self, rows: int) -> ChainLength:
        """For so many sequences: this one, however many there are."""
        return self

    def seconds(self, drafts: int) -> float:
        """Of a pass with ``drafts`` drafted tokens a sequence: measured; on the line between the measured ones beside it; beyond them the
        nearest, by the ratio that the plan has between both."""
        known = self.measured
        if drafts in known or not known:
            return known.get(drafts, self.planned(drafts))
        below, above = max((k for k in known if k < drafts), default=None), min((k for k in known if k > drafts), default=None)
        if below is not None and above is not None:
            return known[below] + (known[above] - known[below]) * (drafts - below) / (above - below)
        nearest = above if below is None else below
        assert nearest is not None
        return known[nearest] * self.planned(drafts) / self.planned(nearest)

    def worth(self, drafts: int) -> float:
        """Tokens a second and sequence."""
        return self.acceptance.expected(drafts) / self.seconds(drafts)

    @property
    def best(self) -> int:
        """The length that gives the most tokens a second; the shorter of equals."""
        return best_length(self.most, self.worth)

    def choose(self) -> int:
        """For the next pass. What seems not to pay is tried now and then: a longer chain, or none."""
        if not self.measured:
            return 0
        best = self.best
        other = min(self.most, max(1, 2 * best)) if self._longer or not best else 0
        loss_s = self.seconds(other) * (1 - self.worth(other) / self.worth(best))
        if loss_s > TRIALS * self._since_trial_s:
            return best
        self._since_trial_s, self._longer = 0.0, not self._longer
        return other

    def took(self, drafts: int, seconds: float) -> None:
        """A pass with ``drafts`` drafted tokens a sequence took ``seconds``, drafting counted."""
        before = self.measured.get(drafts)
        self.measured[drafts] = seconds if before is None else before + WEIGHT * (seconds - before)
        self._since_trial_s += seconds
