"""An explanation for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.planner.common.console import WIDTH, uncut
from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.explain.constraints import Constraint, Grip
from penstock.planner.explain.explanation import WORSE, Explanation, advice, step_text
from penstock.planner.explain.margins import Margin
from penstock.planner.explain.neighbours import Neighbour
from penstock.planner.solver.impossible import Impossible, shown_gb
from penstock.planner.solver.simple_choice import doubt

_LOOKS = {Grip.binds: "bold yellow", Grip.needed: "", Grip.slack: "dim"}
EXPLAINED = "Each row solves again with one thing changed. Seconds are of one token; % is of all that is minimised."
SIMPLE = (
    "Each row solves again with one thing changed. Resources are compared with the fastest plan, decisions with the simple one. Seconds "
    "are of one token; % is of all that is minimised. A decision that takes less time does so by the profile, which is not certain."
)


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Everything for a person: what binds, what each resource is worth, what each decision costs elsewhere, what to buy."""
    e = explanation
    _wrapped(console, f"{e.plan.model.name} on {e.plan.hardware.name}", "bold")
    for rule in e.broken:
        _wrapped(console, f"This plan breaks a rule: {rule}. What follows is about the program's own plan.", "bold red")
    _wrapped(console, standing(e))
    console.print()
    with uncut(console):
        console.print(_constraint_table(e.constraints))
        console.print()
        console.print(_margin_table(e.margins))
        console.print()
        console.print(_neighbour_table(e.neighbours))
    _wrapped(console, SIMPLE if e.is_simple else EXPLAINED, "dim")
    console.print()
    console.print(Text("What to buy next", style="bold"))
    first, *others = advice(e)
    _wrapped(console, first, "bold green")
    for sentence in others:
        _wrapped(console, sentence)
    console.print()
    console.print(Text("What one user more costs", style="bold"))
    for sentence in e.one_more.sentences():
        _wrapped(console, sentence)
    if e.was_changed:
        console.print()
        _wrapped(
            console,
            f"The program's own plan: decode {show_seconds(e.own.prediction.decode_s_per_token)} a token, first token "
            f"{show_seconds(e.own.prediction.ttft_s)}; `planner solve` writes it, `planner diff` shows where it differs.",
        )


def standing(explanation: Explanation) -> str:
    """How the plan stands to the best one, in a sentence or two."""
    e, p = explanation, explanation.plan.prediction
    step = (
        f"{show_seconds(p.decode_s_per_token)} a token"
        if e.plan.decisions.batch == 1
        else (f"{show_seconds(p.decode_s_per_token)} a step of {e.plan.decisions.batch} tokens")
    )
    text = f"Decode takes {step}, the first token {show_seconds(p.ttft_s)}. "
    if e.left and e.is_simple:
        return text + f"It is {doubt(e.left)}."
    if e.left and not e.was_changed:
        return text + "The program's own answer is the simple plan, since that another is faster is not certain here."
    slower = p.total_s / e.base.total_s - 1
    if e.was_changed:
        return text + f"The plan is {e.lost:.1%} slower than what the program answers here: it was changed, or made for another machine."
    if e.acted:
        return text + f"It was chosen by simulation: {e.acted.told}."
    if slower > 1e-4:
        return text + f"The fastest plan of all is {slower:.2%} faster and takes more memory."
    faster = [(n.loss, n.key, value_text(n.key, n.value)) for n in e.neighbours if n.loss is not None and n.loss < -WORSE]
    if faster:
        loss, key, value = min(faster, key=lambda found: found[0])
        return (
            text + f"No plan is faster with the {key.rpartition('.')[2]} that a rule of its own chose: {value} would take {-loss:.1%} less."
        )
    return text + "No plan is faster."


def _constraint_table(rows: Iterable[Constraint]) -> Table:
    table = _table("What holds it back", "", "", "used", "")
    for row in rows:
        table.add_row(row.name, str(row.grip), f"{row.share:.0%}", row.note, style=_LOOKS[row.grip])
    return table


def _margin_table(rows: Iterable[Margin]) -> Table:
    table = _table("What each resource is worth", "", "has", "step", "saved per unit", "more", "less")
    for row in rows:
        unit = row.resource.unit
        value = show_seconds(row.value_s) if row.gained_s > 1e-9 * row.base.token_s else "0 s"
        cells = (f"{row.amount:.4g} {unit}", step_text(row), f"{value} per {unit}", signed(-row.gain), signed(row.loss))
        table.add_row(row.resource.name, *cells, style="bold yellow" if row.binds else "")
    return table


def _neighbour_table(rows: Iterable[Neighbour]) -> Table:
    table = _table("What each decision costs at its neighbours", "", "decided", "forced", "a token", "all")
    shown = ""
    for row in rows:
        name, decided = (row.key, value_text(row.key, row.decided)) if row.key != shown else ("", "")
        shown = row.key
        if row.lost_s is None:
            cells = (row.why if len(row.why) < 20 else "breaks a rule", "")
        else:
            cells = (seconds_more(row.lost_s, row.base.token_s), signed(row.loss))
        table.add_row(name, decided, "as in the plan" if row.is_decided else value_text(row.key, row.value), *cells)
    return table


def seconds_more(seconds: float, of: float) -> str:
    """A difference; what the solver's tolerance leaves is nothing."""
    return "+0 s" if abs(seconds) < 1e-9 * of else f"{'+' if seconds > 0 else '-'}{show_seconds(abs(seconds))}"


def signed(share: float | None) -> str:
    """A change of what is minimised; less is faster."""
    if share is None:
        return "no plan"
    return "0%" if abs(share) < 5e-5 else f"{share:+.2%}"


def value_text(key: str, value: object) -> str:
    """A decision's value as people read it."""
    return show_bytes(value) if key.endswith("_bytes") and isinstance(value, int) else str(value)


def print_impossible(impossible: Impossible, console: Console) -> None:
    """What is short, and what would fit."""
    problem = impossible.problem
    _wrapped(console, f"{problem.model.name} on {problem.hardware.name}", "bold")
    _wrapped(console, "No plan fits.", "bold red")
    console.print()
    table = _table("What is short", "", "has", "lacks", "lacks alone")
    for row in impossible.shortages:
        alone = "more of it alone does not help" if row.alone_bytes is None else shown_gb(row.alone_bytes) if row.alone_bytes else "-"
        lacks = shown_gb(row.together_bytes) if row.together_bytes else "-"
        table.add_row(row.tier.upper(), show_bytes(row.capacity_bytes), lacks, alone, style="bold yellow" if row.together_bytes else "")
    with uncut(console):
        console.print(table)
    console.print()
    table = _table("What would fit, the cheapest first", "", "a token", "prefill")
    for remedy in impossible.remedies:
        found = remedy.found
        table.add_row(remedy.change, *(("-", "-") if found is None else (show_seconds(found.token_s), show_seconds(found.prefill_s))))
    with uncut(console):
        console.print(table)


def _wrapped(console: Console, text: str, style: str = "") -> None:
    for line in textwrap.wrap(text, console.width, break_long_words=False, break_on_hyphens=False):
        console.print(Text(line, style=style), soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    """Names to the left, figures to the right, and the last column to the left."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim", width=WIDTH)
    for at, name in enumerate(columns):
        words = at == 0 or name == ""
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    return table
