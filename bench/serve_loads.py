"""Loads of a server beside what the simulator plays: the very arrivals at shares of the planned load, and clients of closed loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.cases import Row
from bench.clients import COMPLETIONS, arriving
from bench.serve_plans import ServePlans, settled, whole
from bench.serve_rig import Server
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
    """Cases `light`, `ninety` and `closed`."""

    def __init__(self, rig: ServePlans):
        self.rig = rig

    def light(self) -> Iterator[Row]:
        for share in map(float, self.rig.given.get("shares", LIGHT).split(",")):
            load = self._poisson(share, self.rig.new, self.rig.seconds)
            for name, seconds, most in (("p50", load.ttft_s.p50, MOST_P50), ("p99", load.ttft_s.p99, MOST_P99)):
                yield self.rig.row(f"TTFT {name} at {share:.0%}", f"in passes; {load.what}", seconds, load.pass_s, "s", most)
            yield from self._pass_rows(load.passes)

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
        yield from self._pass_rows(load.passes)
        for name in ("p50", "p99"):
            found, played = getattr(load.ttft_s, name), getattr(measured, name)
            yield self._near(f"  TTFT {name}, passes as measured", "beside the simulator's with these", found, played, "")

    def closed(self) -> Iterator[Row]:
        server, name = self.rig.server(self.rig.path)
        rows = ServeLimits.of(self.rig.served).rows
        for clients in map(int, self.rig.given.get("counts", CLOSED).split(",")):
            arrivals, forecast = self.looped(clients, rows)
            new, count, together = arrivals.lengths.new_tokens, arrivals.requests, min(rows, clients)
            self.rig.say(f"{clients} clients, {count} requests of {new} tokens", forecast.seconds)
            before = server.metrics()
            found = settled(self.rig.load(server, name, clients, count, new, seed=f"closed {clients}"), together)
            off = abs(forecast.tokens_per_s / found - 1)
            each = ", ".join(f"{1 / kind.share:.3f} {KINDS[key]}" for key, kind in self._passes(server, before).items() if kind.passes)
            what, near = f"{count} of {new} tokens; passes {each}", forecast.tokens_per_s / found
            yield self.rig.row(f"{clients} clients", what, found, forecast.tokens_per_s, "tok/s", NEAR_RATE, near, ratio=off)

    def looped(self, clients: int, rows: int) -> tuple[Arrivals, ServingForecast]:
        """A closed loop that takes about as long as loads do, and its forecast. Each client asks twice at least, and each row is taken
        three times; replies are whole where there is time for that."""
        least = max(2 * clients, 3 * min(rows, clients))
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
        arrivals = self.arrivals(min(2000, max(40, round(rate * seconds))), rate, new=new)
        forecast, moments = simulate_serving(self.rig.served, arrivals), list(arrivals.moments())
        server, name = self.rig.server(self.rig.path)
        what = f"{arrivals.requests} requests of {new} tokens, {rate:.3g} a second"
        self.rig.say(f"{share:.0%}: {what}", forecast.seconds)
        bodies, before = self.rig.bodies(name, arrivals.requests, new, seed=f"poisson {share}"), server.metrics()
        replies = whole(asyncio.run(arriving(server.address, COMPLETIONS, bodies, moments)), server)
        return Load(arrivals, forecast, Spread.of([reply.ttft_s for reply in replies]), self._passes(server, before), what)

    def _passes(self, server: Server, before: Mapping[str, float]) -> Mapping[str, PassesOf]:
        """Since ``before``."""
        time.sleep(VITAL_S)
        after = server.metrics()
        return {kind: PassesOf.of(before, after, kind) for kind in KINDS}

    def _pass_rows(self, passes: Mapping[str, PassesOf]) -> Iterator[Row]:
        for key, kind in passes.items():
            if kind.passes:
                longest = "" if kind.longest_s is None else f", the longest {kind.longest_s:.3g} s"
                found, predicted = kind.seconds / kind.passes, kind.predicted_s / kind.passes
                yield self.rig.row(f"  pass {KINDS[key]}", f"{kind.passes:.0f}{longest}", found, predicted, "s", "", predicted / found)

    def _near(self, case: str, what: str, found: float, predicted: float, target: str) -> Row:
        off = max(found / predicted, predicted / found)
        return self.rig.row(case, what, found, predicted, "s", target, predicted / found, ratio=off)
