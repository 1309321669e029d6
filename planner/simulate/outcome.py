"""What a simulation found, as figures, JSON and a timeline."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

from penstock.planner.common.timeline.spans import COMPUTE, CPU, EXPERTS, H2D, HOP, KV, SSD, Timeline
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Resource
from penstock.planner.simulate.acted import Acted
from penstock.planner.simulate.lanes.lanes import LINKS, NS

FIGURES = ("ttft_s", "prefill_s", "decode_s_per_token", "decode_tokens_per_s", "ssd_bytes_per_token", "h2d_bytes_per_token")
"""Of ``penstock.planner.contract.bills.cost.Prediction``, what a simulation finds, too."""
PHASES = ("prefill", "decode")
WAITERS = (
    (COMPUTE, H2D),
    (COMPUTE, CPU),
    (COMPUTE, SSD),
    (COMPUTE, KV),
    (COMPUTE, EXPERTS),
    (COMPUTE, HOP),
    (H2D, SSD),
    (H2D, COMPUTE),
    (KV, SSD),
    (KV, COMPUTE),
)


@dataclass(frozen=True)
class Told:
    """``bent`` are the names of rules that the plan breaks; the closed form knows nothing of such plans."""

    acted: Acted
    bent: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.acted.plan

    @property
    def total_s(self) -> float:
        """Of the workload, loading left out."""
        return self.acted.total_ns / NS

    @cached_property
    def figures(self) -> dict[str, float | None]:
        """Those of ``FIGURES``; means over batches and steps. None where there was no step."""
        record = self.acted.record
        prefill_s, steps = fmean(record.prefill_ns) / NS, record.step_ns
        decode_s = fmean(steps) / NS if steps else None
        moved = {track: self.bytes("decode", track) / len(steps) if steps else None for track in (Resource.ssd, Resource.h2d)}
        return {
            "ttft_s": prefill_s,
            "prefill_s": prefill_s,
            "decode_s_per_token": decode_s,
            "decode_tokens_per_s": self.plan.decisions.batch * self.plan.prediction.tokens_a_pass / decode_s if decode_s else None,
            "ssd_bytes_per_token": moved[Resource.ssd],
            "h2d_bytes_per_token": moved[Resource.h2d],
        }

    def closed(self, name: str) -> float | None:
        """The closed form's figure, where it has one."""
        return None if self.bent else getattr(self.plan.prediction, name)

    def bytes(self, phase: str, stage: Resource) -> int:
        """What ``stage`` brought in ``phase``; writes of KV apart."""
        tracks = {Resource.ssd: (SSD,), Resource.h2d: (H2D, KV, EXPERTS)}[stage]
        return sum(self.acted.record.counts[f"{phase} {track} bytes"] for track in tracks)

    @property
    def read_bytes(self) -> int:
        """From the SSD, in all."""
        return sum(self.bytes(phase, Resource.ssd) for phase in PHASES)

    def seconds(self, phase: str) -> float:
        """Of all passes of ``phase``."""
        return sum(self.acted.record.prefill_ns if phase == "prefill" else self.acted.record.step_ns) / NS

    def busy(self, phase: str, track: str) -> float:
        """Share of the time of ``phase`` in which ``track`` had work in flight."""
        seconds = self.seconds(phase)
        return self.acted.record.counts[f"{phase} {track} ns"] / NS / seconds if seconds else 0.0

    def waits(self) -> dict[str, tuple[int, float]]:
        """ "Who waits for whom" -> (times, seconds)."""
        counts = self.acted.record.counts
        keys = (f"{who} waits for {whom}" for who, whom in WAITERS)
        return {key: (counts[key], counts[f"{key}, ns"] / NS) for key in keys if counts[key]}

    def document(self) -> dict[str, Any]:
        """As plain JSON values."""
        record, cache, plan = self.acted.record, asdict(self.acted.cache), self.plan
        del cache["log"], cache["warm_layers"]
        found = {name: _plain(name, value) for name, value in self.figures.items()}
        closed = {name: _plain(name, self.closed(name)) for name in FIGURES}
        return {
            "hardware": plan.hardware.name,
            "model": plan.model.name,
            "workload": plan.workload.name,
            "batch": plan.decisions.batch,
            "rules_broken": list(self.bent),
            "simulated": found,
            "closed_form": None if self.bent else closed,
            "ratio": None
            if self.bent
            else {name: _six(of / value) if value and (of := closed[name]) is not None else None for name, value in found.items()},
            "total_s": _six(self.total_s),
            "step_s": _steps(record.step_ns),
            "cache": {**cache, "wait_s": _six(cache["wait_s"]), "held_layers": record.held},
            "experts": {name: vars(counts) for name, counts in self.acted.experts.items()} or None,
            "experts_computed_on_cpu": self.acted.computed_on_cpu,
            "waits": {key: {"times": times, "seconds": _six(seconds)} for key, (times, seconds) in self.waits().items()},
            "busy": {phase: {track: _six(share) for track in LINKS if (share := self.busy(phase, track))} for phase in PHASES},
            "ssd_bytes": self.read_bytes,
            "passes": {"of": len(record.step_ns) + len(record.prefill_ns), "acted_out": self.acted.acted_passes},
        }

    def timeline(self) -> Timeline:
        """For `trace=`: the same spans on the same tracks as those of a run."""
        plan = self.plan
        facts = {"model": plan.model.name, "hardware": plan.hardware.name, "spans_not_kept": self.acted.record.dropped, "simulated": True}
        return Timeline(self.acted.record.spans, (), f"{plan.model.name} on {plan.hardware.name}, simulated", facts)


def _steps(step_ns: list[int]) -> dict[str, float | None] | None:
    if not step_ns:
        return None
    return {"first": _six(step_ns[0] / NS), "median": _six(median(step_ns) / NS), "last": _six(step_ns[-1] / NS)}


def _plain(name: str, value: float | None) -> float | None:
    return round(value) if value is not None and name.endswith("bytes_per_token") else _six(value)


def _six(value: float | None) -> float | None:
    """Six figures are enough."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")
