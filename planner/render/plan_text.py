"""A plan for a person: what was assumed, what each stage allows, what was decided, what it promises."""

from __future__ import annotations

import textwrap
from itertools import chain

from rich.console import Console
from rich.text import Text

from penstock.planner.common.console import print_head, print_line, print_rows, print_table
from penstock.planner.common.measures import GB, show_bytes, show_rate, show_seconds
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Resource
from penstock.planner.render.assumed import assumed, products_beside
from penstock.planner.render.decided import decided
from penstock.planner.render.prediction_text import print_prediction
from penstock.planner.render.rank_rows import print_ranks
from penstock.planner.render.stage_names import stage_names
from penstock.planner.render.tier_bars import print_tiers
from penstock.planner.render.whereabouts import beside_bytes


def print_plan(plan: Plan, console: Console) -> None:
    """Print ``plan`` for a person."""
    _print_title(plan, console)
    print_table(console, "Assumed", chain(assumed(plan.hardware, plan.model, plan.ranks.count), products_beside(plan.of_rank(0))))
    _print_stages(plan, console)
    print_ranks(plan, console)
    print_rows(console, "Decided" if plan.ranks.count == 1 else "Decided of rank 0", decided(plan.of_rank(0)))
    print_tiers(plan, console)
    print_prediction(plan, console)
    for note in plan.notes:
        _print_note(console, note)


def _print_title(plan: Plan, console: Console) -> None:
    model, work = plan.model, plan.workload
    title = Text(f"{model.name} on {plan.hardware.name}", style="bold")
    hosts = f" on {plan.hardware.hosts} hosts" * (plan.hardware.hosts > 1)
    dealt = f", over {plan.ranks.count} ranks{hosts}" * (plan.ranks.count > 1)
    title.append(f"  {model.layers} layers, {show_bytes(model.weight_bytes)} of weights{dealt}", style="not bold")
    print_line(console, title)
    room = f"context {work.max_tokens}, " if work.max_tokens > work.end_tokens else ""
    print_line(
        console,
        Text(
            f"{work.name}: {work.prompt_tokens} prompt + {work.new_tokens} new tokens, {room}batch {plan.decisions.batch}, "
            f"{work.requests} request{'s' * (work.requests != 1)}, for {work.objective}",
            style="dim",
        ),
    )


def _print_note(console: Console, note: str) -> None:
    """Notes are whole sentences: wrapped, and a path that is longer than a line is left in one piece."""
    lines = textwrap.wrap(
        f"note: {note}", console.width, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    for line in lines:
        console.print(Text(line, style="dim"), soft_wrap=True)


def _print_stages(plan: Plan, console: Console) -> None:
    predicted, batch = plan.prediction, plan.decisions.batch
    print_head(console, "Ceilings", ", each stage alone")
    titles = f"  {'':<11} {'prefill':>10} {'decode/token':>13} {'tokens/s':>10} {'bytes/token':>12} {'GB/s':>7}"
    print_line(console, Text(titles, style="dim"))
    moved = {Resource.ssd: predicted.ssd_bytes_per_token, Resource.h2d: predicted.h2d_bytes_per_token, Resource.cpu: beside_bytes(plan)}
    for stage, name in stage_names(plan).items():
        prefill, decode = predicted.prefill_stages[stage], predicted.decode_stages[stage]
        if not prefill and not decode:
            continue
        nbytes = moved.get(stage, 0)
        rate = show_rate(batch / decode) if decode else "-"
        flow = f"{show_bytes(nbytes):>12} {nbytes / decode / GB:>7.3g}" if nbytes and decode else ""
        row = Text(f"  {name:<11} ").append(f"{show_seconds(prefill):>10}", _slowest(stage == predicted.bottleneck_prefill))
        row.append(f" {show_seconds(decode):>13} {rate:>10}", _slowest(stage == predicted.bottleneck_decode))
        print_line(console, row.append(f" {flow}".rstrip()))


def _slowest(slowest: bool) -> str:
    return "bold yellow" if slowest else ""
