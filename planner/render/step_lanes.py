"""One decode step as its prediction has it: each stage works through its units in forward order, side by side with the others."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Resource, computing_of
from penstock.planner.render.stage_names import decode_waits
from penstock.planner.render.whereabouts import beside_bytes, beside_card

EACH_PASS = "each pass"
"""The lane of what no stage explains (``HardwareProfile.pass_s``)."""

KINDS = {
    "attn": "attention",
    "ffn": "FFN",
    "head": "LM head",
    "layer": "layers",
    "rest": "KV and routed experts",
    "wait": "waiting for experts, for the host or for each other",
    "pass": "what no stage explains",
}
"""What pieces of work are there, and what people call them."""


@dataclass(frozen=True)
class Part:
    """A piece of a stage's work, in seconds from the step's beginning. ``kind`` is one of ``KINDS``."""

    name: str
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Lane:
    """One stage's work of one step."""

    stage: str
    parts: tuple[Part, ...]

    @property
    def busy_s(self) -> float:
        return self.parts[-1].end_s - self.parts[0].start_s


def lanes(plan: Plan) -> tuple[Lane, ...]:
    """The stages that work at all. A stage's seconds are shared out by bytes; those of compute evenly over the layers."""
    p, placement = plan.prediction, plan.placement
    ssd = [(f"layer {i}", "layer", placement.layer_dram_bytes(i)) for i in placement.ssd_layers]
    host = beside_card(plan)
    h2d, cpu = (
        [(str(unit), unit.kind, placement.unit_bytes(unit)) for unit in units]
        for units in (placement.step_units if host else placement.streamed_units, host)
    )
    work: dict[str, list[tuple[str, str, int]]] = {
        Resource.ssd: [*ssd, ("KV and experts", "rest", p.ssd_bytes_per_token - sum(n for *_, n in ssd))],
        Resource.h2d: [*h2d, ("KV and experts", "rest", p.h2d_bytes_per_token - sum(n for *_, n in h2d))],
        Resource.d2h: [("KV", "rest", 1)],
        **({Resource.cpu: [*cpu, ("experts", "rest", beside_bytes(plan) - sum(n for *_, n in cpu))]} if plan.hardware.gpu else {}),
        computing_of(plan.hardware): [(f"layer {i}", "layer", 1) for i in range(plan.model.layers)],
    }
    found = [Lane(stage, _in_turn(work[stage], 0.0, p.decode_stages[stage])) for stage in work if p.decode_stages[stage] > 0]
    at_s = max(p.decode_stages.values())
    for wait in decode_waits(plan):
        found.append(Lane(wait.name, (Part(wait.meanwhile, "wait", at_s, at_s + wait.seconds),)))
        at_s += wait.seconds
    if plan.passes_s["decode"]:
        found.append(Lane(EACH_PASS, (Part("no stage works", "pass", at_s, p.decode_s_per_token),)))
    return tuple(found)


def _in_turn(work: list[tuple[str, str, int]], start_s: float, seconds: float) -> tuple[Part, ...]:
    total = sum(size for *_, size in work)
    parts, at = [], start_s
    for name, kind, size in work:
        if size > 0:
            end = at + seconds * size / total
            parts.append(Part(name, kind, at, end))
            at = end
    return tuple(parts) or (Part("", "rest", start_s, start_s + seconds),)
