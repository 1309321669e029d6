"""Expert policies compared over one routings: each beside LRU and beside the best that was possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.prefetch import Prefetch
from penstock.planner.contract.experts.routing import Routings
from penstock.planner.replay.replayed import Advance, Fetched, Kept, Replay, replay, replay_belady

BELADY = "belady"
"""The name of the bound among the policies."""


@dataclass(frozen=True)
class Score:
    """One policy at one number of slots. Shares of 1; None where nothing is to be divided."""

    policy: str
    slots: int
    hit_rate: float
    """Of the uses, those found in slots."""
    regret: float | None
    """Of what Belady finds more than LRU, what this one does not find: 0 is Belady, 1 LRU."""
    missed_per_token: float
    """Experts of all layers: what comes from below, ahead or on demand."""
    fetched_per_token: float
    """Experts that were fetched ahead, of all layers."""
    precision: float | None
    """Of those fetched ahead, the used ones."""
    recall: float | None
    """Of what was missing, the part that was fetched ahead."""
    ready_rate: float
    """Of the uses, those found in slots or fetched ahead."""
    named_rate: float | None
    """Of the uses, those among the ``slots`` experts of their layer that the policy found likeliest, held or not."""

    @property
    def wasted_per_token(self) -> float:
        """Experts that were fetched ahead and not used, unless they were cancelled in time."""
        return self.fetched_per_token * (1 - (self.precision or 0))


@dataclass(frozen=True)
class Comparison:
    """All policies at all numbers of slots."""

    routings: Routings
    slots: tuple[int, ...]
    prefetch: Prefetch
    bound: Kept
    replays: dict[ExpertPolicyName, Replay]
    """LRU always is one of them."""

    def scores(self) -> list[Score]:
        """The bound's and every policy's, in the order of the slots."""
        found = [self._score(BELADY, self.bound, n, None) for n in self.slots]
        for name, record in self.replays.items():
            fetched = {f.slots: f for f in record.fetched}
            found += [self._score(name.value, record.kept, n, fetched.get(n)) for n in self.slots]
        return found

    def _score(self, policy: str, kept: Kept, slots: int, fetched: Fetched | None) -> Score:
        best, lru = self.bound.hits[slots], self.replays[ExpertPolicyName.lru].kept.hits[slots]
        missed = kept.uses - kept.hits[slots]
        ahead, right = (fetched.fetched, fetched.right) if fetched else (0, 0)
        return Score(
            policy=policy,
            slots=slots,
            hit_rate=kept.rate(slots),
            regret=(best - kept.hits[slots]) / (best - lru) if best > lru else None,
            missed_per_token=missed / kept.tokens,
            fetched_per_token=ahead / kept.tokens,
            precision=right / ahead if ahead else None,
            recall=right / missed if fetched and missed else None,
            ready_rate=(kept.hits[slots] + right) / kept.uses,
            named_rate=fetched.named / kept.uses if fetched else None,
        )


def compare(
    routings: Routings, names: Sequence[ExpertPolicyName], slots: Sequence[int], prefetch: Prefetch, advance: Advance = lambda tokens: None
) -> Comparison:
    """Act the routings out under LRU and each of ``names``, and with foresight. ``advance`` gets each policy's tokens."""
    bound = replay_belady(routings, advance)
    every = dict.fromkeys([ExpertPolicyName.lru, *names])
    return Comparison(routings, tuple(slots), prefetch, bound, {name: replay(routings, name, slots, prefetch, advance) for name in every})


def document(comparison: Comparison, expert_bytes: int | None) -> dict[str, Any]:
    """``comparison`` for JSON. Bytes need the size of an expert."""
    routings, rows = comparison.routings, []
    for score in comparison.scores():
        row = {name: _short(getattr(score, name)) for name in Score.__dataclass_fields__}
        row["wasted_per_token"] = _short(score.wasted_per_token)
        if expert_bytes is not None:
            row["missed_bytes_per_token"] = round(score.missed_per_token * expert_bytes)
            row["wasted_bytes_per_token"] = round(score.wasted_per_token * expert_bytes)
        rows.append(row)
    kept = {BELADY: comparison.bound} | {name.value: record.kept for name, record in comparison.replays.items()}
    return {
        "tokens": comparison.bound.tokens,
        "layers": routings.layers,
        "experts": routings.count,
        "top_k": routings.top_k,
        "expert_bytes": expert_bytes,
        "prefetch": comparison.prefetch.most,
        "least_chance": comparison.prefetch.least_chance,
        "scores": rows,
        "hit_rates": {name: [_short(record.rate(n)) for n in range(routings.count + 1)] for name, record in kept.items()},
    }


def _short(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value
