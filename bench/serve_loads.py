"""Loads of a server beside what the simulator plays: the very arrivals at shares of the planned load, and clients of closed loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bench.cases import Row
from bench.clients import COMPLETIONS
from bench.serve_plans import ServePlans, settled
from bench.serve_rig import Server, grown, histogram_share
from bench.serve_streams import LeftEarly, first_tokens
from bench.sse import Reply
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.stages import MixedPass
from penstock.planner.contract.serving.arrivals import Arrivals, Lengths
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serving_forecast import ServingForecast, Spread, planned_load, simulate_serving

LIGHT, CLOSED = "0.3,0.6", "1,8,32,64"
MOST_P50, MOST_P99, NEAR_TTFT, NEAR_RATE = "<= 2.2", "<= 4", "<= 1.25", "<= 0.1"
VITAL_S = 1.5
"""Longer than between two words of the engine on itself."""
SHORTER = 4
"""Replies of `ninety` are so much shorter than those of the other loads. Waits at 90 % are rare and long, and what they are is chance
until many requests have come and gone: with replies of 128 tokens passes that are 3 % longer made the p99 of 70 requests 1.6 times as long,
with 32 tokens and 200 to 270 requests in the same time 1.03 to 1.2 times."""
NINETY_SHARE = 2
"""`ninety` lasts so much longer than other loads."""
LONGER = 1.03
"""Passes that are so much longer: how far TTFTs then are from those that are simulated says what a row is worth."""
FEWEST = 24
"""Requests of a load at random moments."""
LEAST_SHARE = ">= 0.92"
CROWD = 3, 2
"""Requests of each client of `crowd`: the first, or the last where the time is short. Two are a whole wave between two others' halves."""
CUTS = (1, 2, 4, 8)
"""By which replies of closed loops are shorter, where whole ones take too long."""


@dataclass(frozen=True)
class PassesOf:
    """Passes of one kind in a load."""

    passes: float
    seconds: float
    predicted_s: float
    longest_s: float | None
    """None: no longer than before the load."""

    @property
    def share(self) -> float:
        """Measured over predicted; 1 where there were none."""
        return self.seconds / self.predicted_s if self.predicted_s else 1.0

    @classmethod
    def of(cls, before: Mapping[str, float], after: Mapping[str, float], kind: str) -> PassesOf:
        def grew(name: str) -> float:
            key = f'penstock_kind_{name}{{kind="{kind}"}}'
            return after.get(key, 0.0) - before.get(key, 0.0)

        longest = f'penstock_kind_longest_pass_seconds{{kind="{kind}"}}'
        seconds, predicted_s = grew("pass_seconds_total"), grew("predicted_pass_seconds_total")
        return cls(grew("passes_total"), seconds, predicted_s, after[longest] if grew("longest_pass_seconds") > 0 else None)


KINDS = {"prompt": "with a prompt", "decode": "without"}


class ScaledPrices(PassPrices):
    """Prices of ``plan``, times what passes of each kind took over them."""

    def __init__(self, plan: Plan, decode: float, prompt: float):
        super().__init__(plan)
        self._decode_share, self._prompt_share = decode, prompt

    def decode_s(self, rows: int, context: float) -> float:
        return self._decode_share * super().decode_s(rows, context)

    def mixed_s(self, mixed: MixedPass) -> float:
        return self._prompt_share * super().mixed_s(mixed)


def passes_of(before: Mapping[str, float], after: Mapping[str, float]) -> Mapping[str, PassesOf]:
    """Between two pages of /metrics."""
    return {kind: PassesOf.of(before, after, kind) for kind in KINDS}


def pass_rows(rig: ServePlans, passes: Mapping[str, PassesOf]) -> Iterator[Row]:
    """A mean pass of each kind, beside the plan's."""
    for key, kind in passes.items():
        if kind.passes:
            longest = "" if kind.longest_s is None else f", the longest {kind.longest_s:.3g} s"
            found, predicted = kind.seconds / kind.passes, kind.predicted_s / kind.passes
            yield rig.row(f"  pass {KINDS[key]}", f"{kind.passes:.0f}{longest}", found, predicted, "s", "", predicted / found)


@dataclass(frozen=True)
class Loop:
    """A closed loop: its forecast and tokens a second, and the server's figures before and after it."""

    forecast: ServingForecast
    found: float
    before: Mapping[str, float]
    after: Mapping[str, float]
    what: str


@dataclass(frozen=True)
class Load:
    """What a load was and what came of it."""

    arrivals: Arrivals
    forecast: ServingForecast
    ttft_s: Spread
    passes: Mapping[str, PassesOf]
    what: str

    @property
    def pass_s(self) -> float:
        """Of a mean pass."""
        return sum(kind.seconds for kind in self.passes.values()) / sum(kind.passes for kind in self.passes.values())


class Loads:
    """Cases `crowd`, `idle`, `light`, `ninety` and `closed`."""

    def __init__(self, rig: ServePlans):
        self.rig = rig

    @cached_property
    def full(self) -> Loop:
        """Of all clients, with whole replies."""
        return self._closed(self.rig.clients, *self._crowded())

    def crowd(self) -> Iterator[Row]:
        """Tokens a second of clients that come and go, over those of as many rows that stay."""
        step_s = self.rig.fixed(self.rig.clients).step_s
        loop, predicted = self.full, self.full.forecast.tokens_per_s
        what, limit = f"over the fixed batch; {loop.what}", self.rig.clients / step_s
        yield self.rig.row(f"{self.rig.clients} clients", what, loop.found, limit, "tok/s", LEAST_SHARE, predicted / loop.found)

    def idle(self) -> Iterator[Row]:
        before, after = self.full.before, self.full.after
        idle_s, busy_s = (grown(before, after, f"penstock_engine_{kind}_seconds_total") for kind in ("idle", "busy"))
        what = f"{self.rig.clients} streams"
        yield self.rig.row("engine idle between steps", what, idle_s, idle_s + busy_s, "s", "<= 0.01")
        way_s = histogram_share(before, after, "penstock_token_to_socket_seconds", 0.99)
        if way_s is None:
            raise SystemExit("penstock_token_to_socket_seconds: nothing was counted")
        yield self.rig.row("token to socket, p99", what, way_s, 0.002, "s", "<= 1")

    def light(self) -> Iterator[Row]:
        for share in map(float, self.rig.given.get("shares", LIGHT).split(",")):
            load = self._poisson(share, self.rig.new, self.rig.seconds)
            for name, seconds, most in (("p50", load.ttft_s.p50, MOST_P50), ("p99", load.ttft_s.p99, MOST_P99)):
                yield self.rig.row(f"TTFT {name} at {share:.0%}", f"in passes; {load.what}", seconds, load.pass_s, "s", most)
            yield from pass_rows(self.rig, load.passes)

    def ninety(self) -> Iterator[Row]:
        """Behind the two rows: what passes took over what the plan predicts, and the simulator again with passes as long as measured. Far
        from the first and near to the second: prices are wrong. Far from both: scheduler or front."""
        load = self._poisson(0.9, max(1, self.rig.new // SHORTER), NINETY_SHARE * self.rig.seconds)
        longer, measured = (
            simulate_serving(self.rig.served, load.arrivals, ServeLimits.of(self.rig.served), ScaledPrices(self.rig.served, *shares)).ttft_s
            for shares in ((LONGER, LONGER), (load.passes["decode"].share, load.passes["prompt"].share))
        )
        for name in ("p50", "p99"):
            found, predicted, then = (getattr(spread, name) for spread in (load.ttft_s, load.forecast.ttft_s, longer))
            what = f"{load.what}; passes {LONGER - 1:.0%} longer: x {then / predicted:.2f}"
            yield self._near(f"TTFT {name} at 90%", what, found, predicted, NEAR_TTFT)
        yield from pass_rows(self.rig, load.passes)
        for name in ("p50", "p99"):
            found, played = getattr(load.ttft_s, name), getattr(measured, name)
            yield self._near(f"  TTFT {name}, passes as measured", "beside the simulator's with these", found, played, "")

    def closed(self) -> Iterator[Row]:
        """The clients of `crowd` are asked no second time."""
        for clients in map(int, self.rig.given.get("loops", CLOSED).split(",")):
            loop = self.full if clients == self.rig.clients else self._closed(clients, *self.looped(clients, self.rows))
            found, predicted = loop.found, loop.forecast.tokens_per_s
            off, near = abs(predicted / found - 1), predicted / found
            yield self.rig.row(f"{clients} clients", loop.what, found, predicted, "tok/s", NEAR_RATE, near, ratio=off)

    @property
    def rows(self) -> int:
        return ServeLimits.of(self.rig.served).rows

    def _closed(self, clients: int, arrivals: Arrivals, forecast: ServingForecast) -> Loop:
        server, name = self.rig.server(self.rig.path)
        new, count = arrivals.lengths.new_tokens, arrivals.requests
        self.rig.say(f"{clients} clients, {count} requests of {new} tokens", forecast.seconds)
        before = server.metrics()
        replies = self.rig.load(server, name, clients, count, new, seed=f"closed {clients}")
        time.sleep(VITAL_S)
        after = server.metrics()
        each = (f"{1 / kind.share:.3f} {KINDS[key]}" for key, kind in passes_of(before, after).items() if kind.passes)
        what = f"{count} of {new} tokens; passes {', '.join(each)}"
        return Loop(forecast, settled(replies, min(self.rows, clients)), before, after, what)

    def _crowded(self) -> tuple[Arrivals, ServingForecast]:
        for each in CROWD:
            arrivals = self.arrivals(each * self.rig.clients, clients=self.rig.clients)
            forecast = simulate_serving(self.rig.served, arrivals)
            if forecast.seconds <= NINETY_SHARE * self.rig.seconds:
                break
        return arrivals, forecast

    def looped(self, clients: int, rows: int) -> tuple[Arrivals, ServingForecast]:
        """A closed loop that takes about as long as loads do, and its forecast. Each client asks, as many as there are rows ask again, and
        each row is taken three times. Replies are whole where there is time for that."""
        together = min(rows, clients)
        least = max(clients + together, 3 * together)
        for cut in CUTS:
            arrivals = self.arrivals(least, clients=clients, new=max(1, self.rig.new // cut))
            forecast = simulate_serving(self.rig.served, arrivals)
            if forecast.seconds <= self.rig.seconds:
                more = self.arrivals(
                    max(least, round(forecast.requests_per_s * self.rig.seconds)), clients=clients, new=arrivals.lengths.new_tokens
                )
                return more, simulate_serving(self.rig.served, more)
        return arrivals, forecast

    def arrivals(self, requests: int, per_s: float = 0.0, clients: int = 1, new: int | None = None) -> Arrivals:
        return Arrivals(Lengths(self.rig.prompt, new or self.rig.new), requests, per_s, clients, 1)

    def _poisson(self, share: float, new: int, seconds: float) -> Load:
        """Measured and simulated at so much of the planned load, for about so many ``seconds`` of arrivals."""
        rate = share * planned_load(self.rig.served, self.arrivals(8 * self.rig.clients, new=new))
        arrivals = self.arrivals(min(2000, max(FEWEST, round(rate * seconds))), rate, new=new)
        forecast, moments = simulate_serving(self.rig.served, arrivals), list(arrivals.moments())
        server, name = self.rig.server(self.rig.path)
        what = f"{arrivals.requests} requests of {new} tokens, {rate:.3g} a second"
        self.rig.say(f"{share:.0%}: {what}", moments[-1])
        bodies, before = self.rig.bodies(name, arrivals.requests, new, seed=f"poisson {share}"), server.metrics()
        replies = self._first_tokens(server, bodies, moments)
        time.sleep(VITAL_S)
        passes = passes_of(before, server.metrics())
        return Load(arrivals, forecast, Spread.of([reply.ttft_s for reply in replies]), passes, what)

    def _first_tokens(self, server: Server, bodies: list[dict[str, Any]], moments: list[float]) -> list[Reply]:
        """When the last request has its first token, no reply is waited for: none of their first tokens is left."""
        try:
            return asyncio.run(first_tokens(server.address, COMPLETIONS, bodies, moments))
        except LeftEarly as error:
            raise SystemExit(f"{error}; {server.words[-500:]}") from None

    def _near(self, case: str, what: str, found: float, predicted: float, target: str) -> Row:
        off = max(found / predicted, predicted / found)
        return self.rig.row(case, what, found, predicted, "s", target, predicted / found, ratio=off)
