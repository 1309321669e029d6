"""A comparison of expert policies for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from penstock.planner.common.measures import GB
from penstock.planner.replay.comparison import BELADY, Comparison, Score


def print_comparison(comparison: Comparison, expert_bytes: int | None, console: Console) -> None:
    """One table for each question, a row a policy, a column a number of slots."""
    routings, ahead = comparison.routings, comparison.prefetch
    console.print(
        f"{comparison.bound.tokens} tokens, {routings.layers} MoE layers of {routings.count} experts, {routings.top_k} a token; "
        f"up to {ahead.most} fetched ahead a layer",
        style="dim",
        soft_wrap=True,
    )
    scores = comparison.scores()
    for title, cell, past in _questions(expert_bytes):
        rows = {s.policy: [cell(x) for x in scores if x.policy == s.policy] for s in scores if s.policy not in past}
        rows = {policy: cells for policy, cells in rows.items() if any(cells)}
        if rows:
            console.print(f"\n{title}", style="bold")
            console.print(_table(comparison.slots, rows))


Cell = Callable[[Score], str]


def _questions(expert_bytes: int | None) -> Iterator[tuple[str, Cell, tuple[str, ...]]]:
    """Title, what stands for a score, and the policies of which it says nothing new."""
    yield "found in slots, %", lambda s: _percent(s.hit_rate), ()
    yield "regret: 0 is Belady's bound, 1 LRU", lambda s: "" if s.regret is None else f"{s.regret:.2f}", (BELADY, "lru")
    yield "fetched ahead: used, %", lambda s: _percent(s.precision), ()
    yield "missing in slots: fetched ahead, %", lambda s: _percent(s.recall), ()
    yield "found in slots or fetched ahead, %", lambda s: "" if s.recall is None else _percent(s.ready_rate), ()
    yield "among as many likeliest, held or not, %", lambda s: _percent(s.named_rate), ()
    unit, size = ("experts", 1.0) if expert_bytes is None else ("GB", expert_bytes / GB)
    yield f"moved for a token since missing in slots, {unit}", lambda s: f"{s.missed_per_token * size:.3g}", ()
    yield f"fetched ahead for a token in vain, {unit}", lambda s: "" if s.precision is None else f"{s.wasted_per_token * size:.3g}", ()


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _table(slots: tuple[int, ...], rows: dict[str, list[str]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("slots", min_width=10)
    for n in slots:
        table.add_column(str(n), justify="right", min_width=4)
    for policy, cells in rows.items():
        table.add_row(policy, *cells)
    return table
