"""What /metrics tells: what the front counts, and the engine's own figures as it last told them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.runtime.serve.front.supervise import Supervisor

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
SHORT = (0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05)
COUNTED: Mapping[str, str] = {
    "passes": "passes",
    "generated_tokens": "generated_tokens",
    "prompt_tokens_total": "prompt_tokens",
    "restored_tokens": "restored_tokens",
    "preempted": "preempted_rows",
    "drafted_tokens": "drafted_tokens",
    "accepted_tokens": "accepted_tokens",
    "draft_s": "draft_seconds",
    "idle_s": "engine_idle_seconds",
    "busy_s": "engine_busy_seconds",
}
"""Figures of the engine's that only grow, with their names here; every other number is a gauge."""
KINDS: Mapping[str, tuple[str, str, type[CounterMetricFamily] | type[GaugeMetricFamily]]] = {
    "passes": ("kind_passes", "Passes with a prompt's tokens, and without", CounterMetricFamily),
    "seconds": ("kind_pass_seconds", "What these took", CounterMetricFamily),
    "predicted_s": ("kind_predicted_pass_seconds", "What the plan predicts of these", CounterMetricFamily),
    "longest_s": ("kind_longest_pass_seconds", "The longest of these", GaugeMetricFamily),
}
"""Figures of passes by their kind, with their names here and what they say."""


class Meters:
    """Of one server, in a registry of its own."""

    def __init__(self, supervisor: Supervisor):
        self.registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("penstock_requests", "Requests answered", ["path", "status"], **make)
        self.open_requests = Gauge("penstock_open_requests", "Requests under way", **make)
        self.connections = Gauge("penstock_connections", "Open connections", **make)
        self.prompt_tokens = Counter("penstock_asked_prompt_tokens", "Tokens of prompts that were begun", **make)
        self.cached_tokens = Counter("penstock_cached_prompt_tokens", "Of these, tokens that were not computed again", **make)
        self.ttft = Spread("penstock_ttft_seconds", "From a request to its first token", SECONDS)
        self.between = Spread("penstock_time_between_tokens_seconds", "Between two tokens of a reply", SECONDS)
        self.to_socket = Spread("penstock_token_to_socket_seconds", "From the engine's knowing a token to the socket", SHORT)
        for each in (self.ttft, self.between, self.to_socket, EngineFigures(supervisor)):
            self.registry.register(each)

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class Spread(Collector):
    """A histogram for what is seen thousands of times a second, from one thread: prometheus_client's own takes 8 us each time."""

    def __init__(self, name: str, says: str, bounds: Sequence[float]):
        self._name, self._says, self._bounds = name, says, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        names = [*map(str, self._bounds), "+Inf"]
        yield HistogramMetricFamily(self._name, self._says, list(zip(names, accumulate(self._counts), strict=True)), self._sum)


class EngineFigures(Collector):
    """The engine's newest ``Vital``, and what its plan predicts, as ``penstock_predicted{figure=...}``."""

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("penstock_ready", "1 where requests are taken", float(self._supervisor.state == "ready"))
        yield CounterMetricFamily("penstock_engine_restarts", "Times that the engine was started anew", self._supervisor.restarts)
        yield from self._figures(self._supervisor.vital or {})
        info = self._supervisor.info
        predicted = GaugeMetricFamily("penstock_predicted", "What the plan predicts", labels=["figure"])
        for name, value in _numbers(info.predicted if info else {}):
            predicted.add_metric([name], value)
        yield predicted

    def _figures(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        for name, value in stats.items():
            if name == "tiers" and isinstance(value, Mapping):
                bytes_ = GaugeMetricFamily("penstock_tier_bytes", "What fills a tier of memory", labels=["tier", "part"])
                for path, number in _numbers(value):
                    tier, _, part = path.partition(".")
                    bytes_.add_metric([tier, part], number)
                yield bytes_
            elif name == "kinds" and isinstance(value, Mapping):
                yield from _by_kind(value)
            elif name == "binds" and isinstance(value, str):
                binds = GaugeMetricFamily("penstock_binds", "1 for what the last pass waited for most", labels=["resource"])
                binds.add_metric([value], 1.0)
                yield binds
            elif name in COUNTED and _is_number(value):
                yield CounterMetricFamily(f"penstock_{COUNTED[name]}", f"The engine's {name}", value)
            else:
                for path, number in _numbers({name: value}):
                    yield GaugeMetricFamily(f"penstock_engine_{path.replace('.', '_')}", f"The engine's {path}", number)


def _by_kind(kinds: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    for key, (name, says, family) in KINDS.items():
        found = family(f"penstock_{name}", says, labels=["kind"])
        for kind, figures in kinds.items():
            found.add_metric([kind], figures[key])
        yield found


def _numbers(stats: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """Every number in nested ``stats``, by its path."""
    for name, value in stats.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{before}{name}.")
        elif _is_number(value):
            yield f"{before}{name}", float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
