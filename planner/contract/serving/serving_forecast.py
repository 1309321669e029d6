"""What a server will show: arrivals played through the scheduler, each pass as long as the plan's laws say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from statistics import fmean
from typing import Any

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.stages import MixedPass
from penstock.planner.contract.serving.arrivals import Arrivals
from penstock.planner.contract.serving.counted_pages import CountedPages
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_drafts import PlannedDrafts
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serve_scheduler import Scheduler
from penstock.planner.contract.serving.serve_step import ServeStep
from penstock.planner.contract.serving.settled_answers import WAVES, settled_answers
from penstock.planner.contract.serving.waiting import QueueFull, ServeRequest

FORECAST_REQUESTS = 1000
"""Of a forecast that nobody asked the length of: half a second of work."""


@dataclass(frozen=True)
class Spread:
    """Seconds: the mean, the middle one, and the one that 99 of 100 do not exceed."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Of all of ``seconds``; nothing of none."""
        if not seconds:
            return cls(0.0, 0.0, 0.0)
        ordered = sorted(seconds)
        return cls(fmean(ordered), *(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)))


@dataclass(frozen=True)
class ServingForecast:
    """Of the whole time, unless said."""

    limits: ServeLimits
    requests: int
    """Answered."""
    refused: int
    """Came to a full queue, or are longer than the pool."""
    given_up: int
    """Times that a row gave its pages up."""
    seconds: float
    passes: int
    requests_per_s: float
    """Between the first and the last quarter of the answers, by their tokens."""
    tokens_per_s: float
    """Of replies, then."""
    ttft_s: Spread
    """From a request's arrival to its first token."""
    between_s: Spread
    """Between two tokens of a reply."""
    pass_s: Spread
    rows: float
    """That decode in a pass, on average."""
    drafted: int
    """Tokens behind those of rows, for a pass to verify."""
    kept: int
    """Of these, by the acceptance that the plan counts on."""

    def document(self) -> dict[str, Any]:
        """As plain JSON values, of six figures."""
        return _rounded(asdict(self))


@dataclass
class _Asked:
    arrived_s: float
    last_s: float | None = None
    """When its newest token came."""


@dataclass
class _Found:
    ttft_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    pass_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    ended_tokens: list[int] = field(default_factory=list)
    """Tokens of all replies, when each request ended."""
    tokens: int = 0
    rows: int = 0
    drafted: int = 0
    kept: int = 0
    refused: int = 0
    given_up: int = 0


class _Playing:
    """A server's day without a server. The clock stands still but for passes, and for waiting until somebody asks."""

    def __init__(self, plan: Plan, arrivals: Arrivals, limits: ServeLimits, prices: PassPrices):
        self._arrivals, self._drafts = arrivals, PlannedDrafts(plan, limits, prices)
        self._reading_s = 0.0
        """Of prompts that a model that drafts has yet to read."""
        self._pages = CountedPages(limits.pages, limits.page_tokens, arrivals.lengths.shared_tokens)
        self._scheduler = Scheduler(limits, self._pages)
        self._chance = random.Random(f"lengths {arrivals.seed}")
        self._luck = random.Random(f"drafts {arrivals.seed}")
        self._most = min(plan.workload.max_tokens if arrivals.lengths.spread else limits.capacity_tokens, limits.capacity_tokens)
        self._moments = list(arrivals.moments())
        """A heap."""
        self._follow = arrivals.requests - len(self._moments)
        """Requests that come once others are answered."""
        self._number = 0
        self._asked: dict[int, _Asked] = {}
        self._starts: dict[int, int] = {}
        """Number -> tokens computed, of those that live."""
        self.now_s = 0.0
        self.found = _Found()

    def run(self) -> _Found:
        while True:
            while self._moments and self._moments[0] <= self.now_s:
                self._ask(heappop(self._moments))
            step = self._scheduler.next_step(self._drafts.behind(self._scheduler.rooms, self._luck))
            if step.rows:
                self._compute(step)
            elif self._moments:
                self.now_s = self._moments[0]
            else:
                return self.found

    def _ask(self, at_s: float) -> None:
        number, self._number = self._number, self._number + 1
        prompt, new = self._arrivals.lengths.draw(self._chance, self._most)
        try:
            self._scheduler.add(ServeRequest(number, prompt, new))
            self._asked[number] = _Asked(at_s)
        except (QueueFull, ValueError):
            self.found.refused += 1
            self._again(at_s)

    def _again(self, at_s: float) -> None:
        """A client of a closed loop asks its next."""
        if self._follow:
            self._follow -= 1
            heappush(self._moments, at_s + self._arrivals.turn_s)

    def _compute(self, step: ServeStep) -> None:
        found = self.found
        found.given_up += len(step.given_up)
        mixed = mixed_of(step)
        seconds = self._drafts.seconds(mixed)
        if mixed.drafted:
            seconds, self._reading_s = seconds + self._reading_s, 0.0
        self.now_s += seconds
        found.pass_s.append(seconds)
        found.rows += mixed.rows
        found.drafted += mixed.drafted
        said = {}
        for share in step.rows:
            if share.kind == "verify":
                said[share.number] = 1 + self._drafts.kept(share.count - 1, self._luck)
                found.kept += said[share.number] - 1
            for _ in range(said.get(share.number, share.wanted)):
                self._token(self._asked[share.number])
            if share.kind == "prompt" and share.wanted:
                self._pages.keep(share.number)
                self._reading_s += self._drafts.reading_s(share.start + share.count)
        for number in self._scheduler.finished((), said):
            del self._asked[number]
            found.ended_s.append(self.now_s)
            found.ended_tokens.append(found.tokens)
            self._again(self.now_s)

    def _token(self, asked: _Asked) -> None:
        found = self.found
        found.tokens += 1
        if asked.last_s is None:
            found.ttft_s.append(self.now_s - asked.arrived_s)
        else:
            found.between_s.append(self.now_s - asked.last_s)
        asked.last_s = self.now_s


def mixed_of(step: ServeStep) -> MixedPass:
    """What ``step`` carries, as its price needs it."""
    rows = context = tokens = before = seen = drafted = 0
    for share in step.rows:
        if share.kind != "prompt":
            rows, context, drafted = rows + 1, context + share.start, drafted + share.count - 1
        else:
            tokens, before, seen = tokens + share.count, before + share.start, seen + share.count * (2 * share.start + share.count)
    return MixedPass(rows, context / max(1, rows), tokens, seen / 2 / max(1, tokens), before, drafted)


def simulate_serving(
    plan: Plan, arrivals: Arrivals, limits: ServeLimits | None = None, prices: PassPrices | None = None
) -> ServingForecast:
    """``arrivals`` served by ``plan``, within its own limits unless others are given. ``prices`` of the same plan may be shared by many
    calls. 10,000 requests of 128 tokens take some seconds."""
    own = limits or ServeLimits.of(plan)
    found = (playing := _Playing(plan, arrivals, own, prices or PassPrices(plan))).run()
    requests_per_s, tokens_per_s = _settled(found, 1 if arrivals.per_s else min(own.rows, arrivals.clients))
    return ServingForecast(
        limits=own,
        requests=len(found.ended_s),
        refused=found.refused,
        given_up=found.given_up,
        seconds=playing.now_s,
        passes=len(found.pass_s),
        requests_per_s=requests_per_s,
        tokens_per_s=tokens_per_s,
        ttft_s=Spread.of(found.ttft_s),
        between_s=Spread.of(found.between_s),
        pass_s=Spread.of(found.pass_s),
        rows=found.rows / max(1, len(found.pass_s)),
        drafted=found.drafted,
        kept=found.kept,
    )


def forecast_of(plan: Plan) -> ServingForecast:
    """Of a server's plan under its own workload: what ``planner solve`` prints."""
    return simulate_serving(plan, Arrivals.of(plan.workload, FORECAST_REQUESTS))


def planned_load(plan: Plan, arrivals: Arrivals, limits: ServeLimits | None = None, prices: PassPrices | None = None) -> float:
    """The highest Poisson rate that is sustained, in requests a second: what the server answers while somebody always waits. Beyond, the
    queue grows for as long as they come. ``arrivals`` says how long requests are, and how many to play: ``WAVES`` times the rows at
    least."""
    own = limits or ServeLimits.of(plan)
    requests = max(arrivals.requests, WAVES * own.rows)
    crowd = Arrivals(arrivals.lengths, requests, 0.0, own.rows + min(own.rows, own.queue), arrivals.seed)
    return simulate_serving(plan, crowd, own, prices).requests_per_s


def _settled(found: _Found, together: int) -> tuple[float, float]:
    """Requests and tokens a second while rows are taken. Requests are counted by their tokens."""
    count = len(found.ended_s)
    first, last = settled_answers(count, together)
    if last == first or found.ended_s[last] <= found.ended_s[first]:
        return (count / found.ended_s[-1], found.tokens / found.ended_s[-1]) if count else (0.0, 0.0)
    tokens_per_s = (found.ended_tokens[last] - found.ended_tokens[first]) / (found.ended_s[last] - found.ended_s[first])
    return tokens_per_s * count / found.tokens, tokens_per_s


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
