"""What a plan promises, in a few lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from penstock.planner.common.console import print_head, print_line
from penstock.planner.common.measures import show_rate, show_seconds
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.serving.arrivals import Arrivals
from penstock.planner.contract.serving.serving_forecast import forecast_of, planned_load
from penstock.planner.render.serving_table import said
from penstock.planner.render.stage_names import decode_bound, stage_names
from penstock.planner.render.whereabouts import beside_bytes


def print_prediction(plan: Plan, console: Console) -> None:
    p = plan.prediction
    drafted = (f"{p.tokens_a_pass:.3g} tokens a sequence",) if plan.decisions.speculation.tokens else ()
    bound = f"bound by {decode_bound(plan)}"
    print_head(console, "Predicted")
    rows = (
        ("load", show_seconds(p.load_s), "once, before the first request"),
        ("first token", show_seconds(p.ttft_s), _of_prefill(plan)),
        ("decode", f"{show_seconds(p.decode_s_per_token)} a {'pass' if drafted else 'token'}", ", ".join((*drafted, bound))),
        (
            "",
            f"{show_rate(p.decode_tokens_per_s)} tokens/s",
            f"all {plan.decisions.batch} sequences together" if plan.decisions.batch > 1 else "",
        ),
    )
    for label, value, remark in rows:
        print_line(console, Text(f"  {label:<11} ").append(f"{value:<22} ", "bold green").append(remark, style="dim"))
    for sentence in filter(None, (_likely(plan), _verdict(plan), _restoring(plan), *_serving(plan))):
        for line in textwrap.wrap(sentence, console.width, initial_indent="  ", subsequent_indent="  "):
            print_line(console, Text(line))


def _of_prefill(plan: Plan) -> str:
    p = plan.prediction
    if plan.workload.is_served:
        return f"half a pass, and {show_seconds(p.prefill_s)} beside {plan.decisions.batch - 1} others"
    if p.restored_tokens:
        return f"restoring {p.restored_tokens} tokens takes {show_seconds(p.restore_s)}"
    first, later, bound = show_seconds(p.ttft_s), show_seconds(p.prefill_s), f"bound by {stage_names(plan)[p.bottleneck_prefill]}"
    return bound if first == later else f"{later} behind another batch, {bound}"


def _likely(plan: Plan) -> str:
    """Between what the predicted seconds lie, and which rates that count have no spread (``lessons.spread``)."""
    ranges = plan.intervals
    named = (("load", ranges.load_s), ("prefill", ranges.prefill_s), ("decode", ranges.decode_s_per_token))
    said = "Nine runs in ten: " + ", ".join(f"{name} {show_seconds(least)} to {show_seconds(most)}" for name, (least, most) in named) + "."
    stated = [
        name
        for name, counts in (
            ("the DRAM bus", Resource.dram in (plan.prediction.bottleneck_prefill, plan.prediction.bottleneck_decode)),
            ("the CPU's products", plan.hardware.gpu is not None and beside_bytes(plan) > 0),
            ("the CPU's attention", plan.decisions.kv.host_layers > 0),
        )
        if counts
    ]
    return f"{said} The rate of {' and of '.join(stated)} is taken as stated." if stated else said


def _restoring(plan: Plan) -> str:
    """From how many tokens on a prompt's head is better restored than computed."""
    if not plan.workload.kept_tokens:
        return ""
    tiers: dict[int | None, list[str]] = {}
    for tier in Tier:
        if tier is not Tier.vram or plan.hardware.gpu:
            tiers.setdefault(plan.break_even.of(tier), []).append(tier.upper())
    pays = (
        f"restoring from {' or '.join(names)} " + ("never pays" if tokens is None else f"pays from {tokens} tokens on")
        for tokens, names in tiers.items()
    )
    return f"Of a prompt of {plan.workload.prompt_tokens} tokens: {', '.join(pays)}."


def _serving(plan: Plan) -> Iterator[str]:
    """What a server's plan takes on, and what it answers."""
    if not plan.workload.is_served:
        return
    found = forecast_of(plan)
    asking = f"{show_rate(plan.workload.arrivals_per_s)} requests/s" if plan.workload.arrivals_per_s else f"{plan.workload.clients} clients"
    yield f"Serves {said(found.limits)}."
    yield (
        f"With {asking}: {show_rate(found.requests_per_s)} requests/s, {show_rate(found.tokens_per_s)} tokens/s, first token after "
        f"{show_seconds(found.ttft_s.p50)} (p50) and {show_seconds(found.ttft_s.p99)} (p99). `planner simulate` plays other loads."
    )
    if not plan.workload.arrivals_per_s:
        return
    load = planned_load(plan, Arrivals.of(plan.workload, found.requests + found.refused))
    if plan.workload.arrivals_per_s > load:
        yield f"Requests come faster than they are answered: {load:.3g} a second are sustained."


def _verdict(plan: Plan) -> str:
    """What to say when nothing is streamed."""
    placement = plan.placement
    units, slots = (plan.model.experts.units if plan.model.experts else 0), plan.decisions.experts
    in_vram, in_dram = (slots.vram_slots >= units, slots.dram_slots >= units) if slots else (True, True)
    kv = plan.decisions.kv
    if plan.hardware.gpu and not placement.streamed_units and in_vram:
        if kv.pages > kv.vram_pages:
            return "All weights fit in VRAM. A part of KV does not."
        return "Everything fits in VRAM: streaming buys nothing here. The plan loads once."
    if not placement.ssd_layers and (in_vram or in_dram):
        return "Everything fits in DRAM: nothing is read from the SSD after loading."
    return ""
