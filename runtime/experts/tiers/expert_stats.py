"""What a tier of experts did, for the report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class TierStats:
    """``hits`` and ``misses`` are of decode steps: experts that a layer found, or did not, in this tier. ``ahead`` are experts fetched
    before their layer asked, ``prompt_ahead`` those of them that a pass of a prompt fetched, ``ahead_used`` those that were then used.
    ``waits`` are the host's, for the SSD."""

    hits: int = 0
    misses: int = 0
    prompt_hits: int = 0
    prompt_misses: int = 0
    ahead: int = 0
    prompt_ahead: int = 0
    ahead_used: int = 0
    waits: int = 0
    wait_s: float = 0.0
    visits: int = 0
    decide_s: float = 0.0
    """Seconds that the policy and what follows from it took; not to look up what is there."""
    policy_s: float = 0.0
    """Of it what the policy took to learn and to judge what stays and what comes."""
    of_prompt: bool = field(default=False, repr=False)
    """Whether the latest visit was a prompt's."""

    def visited(self, prompt: bool, hits: int, misses: int) -> None:
        """A layer was visited."""
        self.visits += 1
        self.of_prompt = prompt
        if prompt:
            self.prompt_hits += hits
            self.prompt_misses += misses
        else:
            self.hits += hits
            self.misses += misses

    def fetched_ahead(self) -> None:
        """An expert begins to be fetched, behind the latest visit."""
        self.ahead += 1
        self.prompt_ahead += self.of_prompt

    @property
    def hit_rate(self) -> float | None:
        """Of decode steps; None where nothing was asked for."""
        return _share(self.hits, self.hits + self.misses)

    def report(self) -> dict[str, float | None]:
        """The counters, and the shares that follow from them."""
        spent = {f"{name}_s_per_visit": _share(getattr(self, f"{name}_s"), self.visits) for name in ("decide", "policy")}
        counted = {name: value for name, value in vars(self).items() if name != "of_prompt"}
        return counted | {"hit_rate": self.hit_rate, "ahead_precision": _share(self.ahead_used, self.ahead)} | spent


@dataclass
class IssueTime:
    """Of a layer's visits by decode steps: processor time from the routing until all that computes with the experts is issued; without a
    card, until it is computed."""

    visits: int = 0
    seconds: float = 0.0


class Deciding:
    """Inside, a tier decides what it holds; one thread at a time. A generator's context would take longer than some decisions. So does a
    thread's own clock on some hosts: 3 µs a reading, ten of which a visit takes."""

    def __init__(self, stats: TierStats):
        self._stats = stats
        self._begun_s = 0.0

    def __enter__(self) -> None:
        self._begun_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._stats.decide_s += time.perf_counter() - self._begun_s


class Judging(Deciding):
    """Inside, it is the tier's policy that thinks."""

    def __exit__(self, *_: object) -> None:
        took_s = time.perf_counter() - self._begun_s
        self._stats.decide_s += took_s
        self._stats.policy_s += took_s


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
