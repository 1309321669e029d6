"""What a server's plan will show, in a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.planner.common.console import WIDTH, print_line, uncut
from penstock.planner.common.measures import show_rate, show_seconds
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.serving.arrivals import Arrivals
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serving_forecast import ServingForecast


def print_serving(plan: Plan, arrivals: Arrivals, load: float, found: Mapping[str, ServingForecast], console: Console) -> None:
    """``found``: forecasts by what they are of. ``load``: the planned one, in requests a second."""
    lengths, limits = arrivals.lengths, next(iter(found.values())).limits
    console.print(Text(f"{plan.model.name} on {plan.hardware.name}, serving, simulated", style="bold"))
    for line in (
        said(limits),
        f"{arrivals.requests} requests of {lengths.prompt_tokens} prompt + {lengths.new_tokens} new tokens, spread {lengths.spread:g}"
        + (f", the first {lengths.shared_tokens} alike" if lengths.shared_tokens else ""),
        f"planned load: {show_rate(load)} requests/s, the highest rate that is sustained",
    ):
        print_line(console, Text(line, style="dim"))
    table = Table(box=None, pad_edge=False, header_style="dim", width=WIDTH)
    table.add_column("")
    for name in ("requests/s", "tokens/s", "TTFT p50", "p99", "between p50", "p99", "rows"):
        table.add_column(name, justify="right")
    for name, one in found.items():
        waits = (one.ttft_s.p50, one.ttft_s.p99, one.between_s.p50, one.between_s.p99)
        table.add_row(name, show_rate(one.requests_per_s), show_rate(one.tokens_per_s), *map(show_seconds, waits), f"{one.rows:.1f}")
    console.print()
    with uncut(console):
        console.print(table)
    for name, one in found.items():
        for count, what in ((one.refused, "requests came to a full queue"), (one.given_up, "times a row gave its pages up")):
            if count:
                print_line(console, Text(f"{name}: {count} {what}"))


def said(limits: ServeLimits) -> str:
    """``limits`` in a line."""
    rows = f"{limits.rows} row" + "s" * (limits.rows > 1)
    return (
        f"{rows}, {limits.pass_tokens} tokens a pass, KV of {limits.capacity_tokens} tokens in pages of {limits.page_tokens}, "
        f"a queue of {limits.queue}"
    )
