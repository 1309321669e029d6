"""How many cards this machine has for a plan, without torch."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.plan import Plan

VISIBLE = "CUDA_VISIBLE_DEVICES"


def cards_here(devices: Path = Path("/dev")) -> int | None:
    """Cards that CUDA may show to this process: those that the driver has a file for, and CUDA_VISIBLE_DEVICES names. None where that is
    none, which torch knows better: some drivers have other files."""
    there = sum(1 for file in devices.glob("nvidia*") if file.name.removeprefix("nvidia").isdigit())
    if not there:
        return None
    named = os.environ.get(VISIBLE)
    if named is None:
        return there
    first = [name.strip() for name in named.split(",")]
    seen = first[: first.index("-1")] if "-1" in first else [name for name in first if name]
    return min(there, len(seen)) or None


def cards_missing(plan: Plan, launched: bool = False, devices: Path = Path("/dev")) -> tuple[tuple[int, ...], int] | None:
    """The numbers of the cards that ``plan`` needs on this host, and how many are here; None where they are all here, or nobody knows.
    A launcher gives each rank the card of its number on the host."""
    here, ranks = cards_here(devices), plan.ranks.count // plan.hardware.hosts
    if plan.hardware.gpu is None or here is None:
        return None
    named = () if launched else plan.hardware.devices[:ranks]
    needed = named or tuple(range(ranks))
    return None if max(needed) < here else (needed, here)


def check_cards(plan: Plan, launched: bool = False) -> None:
    """UserError for a plan of cards that are not here, with the remedy. Before a rank sees its own card alone."""
    missing = cards_missing(plan, launched)
    if missing is not None:
        needed, here = missing
        numbers = f"GPU {needed[0]}" if len(needed) == 1 else f"GPUs {', '.join(map(str, needed))}"
        there = ",".join(map(str, range(here)))
        raise UserError(
            f"the plan is for {numbers}, and this machine has {here}: solve again with hardware.devices=[{there}], or add replan=true to"
            " `runtime run`, which does"
        )


def shown_as(card: int) -> str:
    """What CUDA_VISIBLE_DEVICES says so that number ``card`` of those that this process sees is the only one: its number on the machine, or
    its UUID. Empty where this process does not see so many."""
    seen = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    return seen[card] if card < len(seen) else "" if seen else str(card)
