"""What a plan promises, in a few lines."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

from penstock.planner.common.console import print_head, print_line
from penstock.planner.common.measures import show_seconds
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.render.stage_names import decode_bound, stage_names


def print_prediction(plan: Plan, console: Console) -> None:
    p = plan.prediction
    print_head(console, "Predicted")
    rows = (
        ("load", show_seconds(p.load_s), "once, before the first request"),
        ("first token", show_seconds(p.ttft_s), _of_prefill(plan)),
        ("decode", f"{show_seconds(p.decode_s_per_token)} a token", f"bound by {decode_bound(plan)}"),
        ("", f"{p.decode_tokens_per_s:.3g} tokens/s", f"all {plan.decisions.batch} sequences together" if plan.decisions.batch > 1 else ""),
    )
    for label, value, remark in rows:
        print_line(console, Text(f"  {label:<11} ").append(f"{value:<22} ", "bold green").append(remark, style="dim"))
    for sentence in filter(None, (_likely(plan), _verdict(plan), _restoring(plan))):
        for line in textwrap.wrap(sentence, console.width, initial_indent="  ", subsequent_indent="  "):
            print_line(console, Text(line))


def _of_prefill(plan: Plan) -> str:
    p = plan.prediction
    if p.restored_tokens:
        return f"restoring {p.restored_tokens} tokens takes {show_seconds(p.restore_s)}"
    first, later, bound = show_seconds(p.ttft_s), show_seconds(p.prefill_s), f"bound by {stage_names(plan)[p.bottleneck_prefill]}"
    return bound if first == later else f"{later} behind another batch, {bound}"


def _likely(plan: Plan) -> str:
    """Between what the predicted seconds lie."""
    ranges = plan.intervals
    named = (("load", ranges.load_s), ("prefill", ranges.prefill_s), ("decode", ranges.decode_s_per_token))
    return "Nine runs in ten: " + ", ".join(f"{name} {show_seconds(least)} to {show_seconds(most)}" for name, (least, most) in named) + "."


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


def _verdict(plan: Plan) -> str:
    """What to say when nothing is streamed."""
    placement = plan.placement
    units, slots = (plan.model.experts.units if plan.model.experts else 0), plan.decisions.experts
    in_vram, in_dram = (slots.vram_slots >= units, slots.dram_slots >= units) if slots else (True, True)
    if plan.hardware.gpu and not placement.streamed_units and in_vram:
        return "Everything fits in VRAM: streaming buys nothing here. The plan loads once."
    if not placement.ssd_layers and (in_vram or in_dram):
        return "Everything fits in DRAM: nothing is read from the SSD after loading."
    return ""
