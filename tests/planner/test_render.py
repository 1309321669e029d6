"""What `planner solve` prints of a plan."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from planner.cost import predict
from planner.plan import Plan
from planner.program import solve
from planner.render import print_plan
from tests.planner.small import machine, model, work


@pytest.mark.parametrize("columns", [80, 40])
def test_notes_are_printed_whole(columns: int) -> None:
    notes = ("WSM_PAIR_AHEAD=2 is ignored: " + "units are copied in forward order, " * 5 + "and so on", "kept in /a/path/" + "x" * 90)
    hardware, decoder, asked = machine(), model(), work()
    decisions = solve(hardware, decoder, asked)
    plan = Plan(hardware, decoder, asked, decisions, predict(hardware, decoder, asked, decisions), notes)
    out = io.StringIO()
    print_plan(plan, Console(width=columns, file=out, highlight=False))
    said = out.getvalue()
    told = said[said.index("note:") :].splitlines()
    assert all(len(line) <= columns or " " not in line.strip() for line in told)
    assert " ".join(" ".join(told).split()) == " ".join(f"note: {note}" for note in notes)
