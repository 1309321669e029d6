"""Numbers that a hand writes into a plan and that no plan can have: each is refused by its name before anything is made of it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import yaml

import penstock
from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.planfile import broken_in, check_plan, plan_text, read_plan

GROWTH_BYTES = 512 << 20
"""Of address space, beside what the tests have: a number that is counted out takes more."""


@pytest.fixture(scope="module")
def served() -> str:
    """A plan whose steps are recorded with the CPU beside the card, so that every rule has something to ask."""
    return plan_text(penstock.solve("llama70b", "rtx5080", workload="serve", speculate="auto", calibration="off"))


@pytest.fixture
def little_memory() -> Iterator[None]:
    usual = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + GROWTH_BYTES, usual[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, usual)


@pytest.mark.parametrize(
    ("place", "value", "allowed"),
    [
        ("weights.vram.resident_units.attn", 10**9, "0 to 80"),
        ("weights.vram.resident_units.ffn", 10**30, "0 to 80"),
        ("weights.head_blocks", 10**30, "1 to 128256"),
        ("batch", -1, "1 or more"),
    ],
)
def test_a_number_outside_its_range_is_refused_before_it_is_counted_out(
    place: str, value: int, allowed: str, served: str, tmp_path: Path, little_memory: None
) -> None:
    with pytest.raises(UserError) as refused:
        check_plan(read_plan(edited(served, {place: value}, tmp_path)))
    assert f"{place}={value}; allowed: {allowed}" in str(refused.value) and str(refused.value).isprintable()


def test_all_ranges_that_an_edit_breaks_are_told_together(served: str, tmp_path: Path) -> None:
    path = edited(served, {"weights.head_blocks": 0, "weights.h2d.in_flight": 0, "batch": -1}, tmp_path)
    told = [rule.message.partition(";")[0] for rule in broken_in(read_plan(path))]
    assert [one for one in told if "resident_units.head" not in one] == ["weights.head_blocks=0", "weights.h2d.in_flight=0", "batch=-1"]


def edited(text: str, changes: dict[str, int], folder: Path) -> Path:
    """A file of the plan ``text`` with each of ``changes`` at its place."""
    tree = yaml.safe_load(text)
    for place, value in changes.items():
        *way, last = place.split(".")
        reduce(getitem, way, tree)[last] = value
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
