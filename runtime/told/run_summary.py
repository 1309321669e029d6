"""What a run prints of its report: predicted against measured, stages, what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.contract.bills.cost import Prediction
from penstock.runtime.kv.pages.reuse_facts import told
from penstock.runtime.told.account import table
from penstock.runtime.told.busy import busy_line
from penstock.runtime.told.calibrate import calibrated_line
from penstock.runtime.told.run_report import FIGURES, WORKING, Outcome
from penstock.runtime.told.stage_clock import StageClock

WORTH_SAYING = 0.001
"""Least share of a phase for which a wait is printed."""
_MULTIPLIED = {"stored": "as it is stored", "decode": "decoded", "own": "by sums of our own"}
BOTTLENECKS = ("bottleneck_prefill", "bottleneck_decode")


def show(console: Console, outcome: Outcome, report: Mapping[str, Any], path: Path) -> None:
    """Predicted against measured, stages, checks."""
    console.rule(style="dim")
    console.print(_comparison(outcome.job.plan.prediction, report["measured"], report["ratio"]))
    if report["kv_reuse"] or len(report["requests"]) > 1:
        console.print(table(report["requests"], report["requests_total"]))
    console.print(_stage_table(outcome.clock))
    for line in _standing_still(outcome.clock):
        console.print(line)
    for phase, shares in report["busy"].items():
        console.print(busy_line(phase, shares))
    if "busy_share" in report["gpu"]:
        console.print(_gpu_line(report["gpu"]))
    cache = report["cache"]
    console.print(
        f"DRAM cache: {cache['hits']} hits, {cache['misses']} misses, {cache['loads']} loads,"
        f" {cache['evictions_out_of_window'] + cache['evictions_in_window']} evictions, waited {show_seconds(cache['wait_s'])}"
    )
    for name in ("vram", "dram"):
        if report["experts"] and report["experts"][name]:
            console.print(_expert_line(name, report["experts"][name]))
    if report["kv_reuse"]:
        for line in told(report["kv_reuse"]):
            console.print(line, soft_wrap=True)
    if report["stalls"]["count"]:
        stalls = (
            "{count} reads stalled and lost {lost_s:.2f} s beyond the median of {median_s:.3f} s;"
            " the longest took {longest_s:.2f} s at offset {offset} of {file}, {when}"
        )
        console.print(stalls.format(**report["stalls"]), style="yellow", markup=False, soft_wrap=True)
    if asked := report.get("allocations_after_warmup"):
        console.print(asked_line(asked), style="yellow", markup=False, soft_wrap=True)
    if outcome.logits:
        differ = "relative difference {relative_l2:.2%}, BF16 rounding explains {rounding:.2%}"
        same = "bit-identical" if outcome.logits["identical"] else differ
        text = f"logits of {{passes}} passes against {{against}}: {same}, same top token {{same_argmax:.1%}}"
        console.print(text.format(**outcome.logits), style="bold")
        if not outcome.logits["within_rounding"]:
            console.print("logits are further off than rounding explains: the run computes something else", style="bold red")
    if report["cpu_product"]:
        console.print(
            "the CPU's products: " + ", ".join(f"{form} {_MULTIPLIED[how]}" for form, how in sorted(report["cpu_product"].items()))
        )
    if report["speculation"]:
        console.print(_drafts_line(report["speculation"]))
    if report["calibration"]:
        console.print(calibrated_line(report["calibration"]), markup=False, soft_wrap=True)
    for line in outcome.rules_broken:
        console.print(f"rule broken at run time: {line}", style="bold red", markup=False)
    if report["interrupted"]:
        console.print(f"interrupted: {report['decode_tokens_total']} tokens are known, and figures are of these", style="yellow")
    console.print(f"report: {path}", style="dim", soft_wrap=True)


def asked_line(times: int) -> str:
    """Of VRAM that was asked of the driver after the start."""
    return (
        f"the driver was asked for VRAM {times} times after the start, and the card waited for each: activations found no place;"
        " solve again with a smaller force.prefill_chunk_tokens"
    )


def _drafts_line(drafts: Mapping[str, Any]) -> str:
    kept = f"{drafts['kept']} of {drafts['drafted']} tokens kept, " if drafts["drafted"] else "no token drafted, "
    return f"drafts by {drafts['drafter']}: {kept}{drafts['tokens_a_pass'] or 1:.2f} tokens a pass and sequence"


def closing(report: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What ends the output, for programs to read."""
    keys = ("ttft_s", "prefill_s", "decode_s_per_token", "decode_tokens_per_s", "bottleneck_decode")
    last = {"report": str(path), **{k: report["measured"][k] for k in keys}, "ratio": report["ratio"]}
    return last | {key: report[key] for key in ("interrupted", "logits", "rules_broken")}


def _expert_line(tier: str, facts: Mapping[str, Any]) -> str:
    """Decode steps alone, but for the time that decisions took."""
    line = f"experts in {tier.upper()}: {facts['hits']} hits, {facts['misses']} misses"
    if facts["ahead"]:
        line += f", {facts['ahead_used']} of {facts['ahead']} fetched ahead were used"
    return line + (f"; decided in {facts['decide_s_per_visit'] * 1e6:.0f} us a layer" if facts["visits"] else "")


def _comparison(predicted: Prediction, measured: Mapping[str, Any], ratio: Mapping[str, float | None]) -> Table:
    table = _table("predicted against measured", "predicted", "measured", "ratio")
    for key, fmt in FIGURES.items():
        if not getattr(predicted, key) and not measured[key]:
            continue
        got, r = measured[key], ratio[key]
        colour = "green" if r is not None and 0.8 <= r <= 1.25 else "yellow"
        table.add_row(key, fmt(getattr(predicted, key)), "-" if got is None else fmt(got), "-" if r is None else f"[{colour}]{r:.2f}[/]")
    for key in BOTTLENECKS:
        table.add_row(key, str(getattr(predicted, key)), measured[key] or "-", "")
    return table


def _stage_table(clock: StageClock) -> Table:
    table = _table("stages", "bytes", "busy", "MB/s")
    for phase, stages in clock.phases.items():
        for stage, use in stages.items():
            if use.busy_s:
                rate = "" if use.mbps is None else f"{use.mbps:,.0f}"
                table.add_row(f"{phase} {stage}", show_bytes(use.bytes) if use.bytes else "", show_seconds(use.busy_s), rate)
    return table


def _standing_still(clock: StageClock) -> Iterator[str]:
    """The bottleneck of each phase, and for what share of it the next stage waited."""
    for phase in WORKING:
        stages = {name: use for name, use in clock.phases[phase].items() if use.busy_s}
        if stages:
            slowest = max(stages, key=lambda name: stages[name].busy_s)
            share = stages[slowest].busy_s / clock.seconds[phase]
            waited = ", ".join(f"{name} {part:.1%}" for name, part in clock.waited(phase).items() if part >= WORTH_SAYING)
            yield f"{phase}: bound by {slowest}, busy {min(1.0, share):.1%} of it; waited for {waited or 'nothing'}"


def _gpu_line(gpu: Mapping[str, Any]) -> str:
    told = {"busy_share": "GPU busy {mean:.0%}", "sm_clock_mhz": "SM clock {mean:.0f} MHz", "power_w": "{mean:.0f} W, at most {max:.0f} W"}
    return ", ".join(text.format(**gpu[key]) for key, text in told.items() if key in gpu)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    return table
