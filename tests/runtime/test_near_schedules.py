"""Recorded steps that try a unit more and one fewer on the CPU; a card is played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.plan.schedules import ALONE, OWN
from penstock.planner.contract.policy.schedule_choice import Schedule
from penstock.runtime.beside.host_library import products_unbuilt
from penstock.runtime.engine import open_session
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from tests.runtime.sessions import CPU, opened
from tests.runtime.test_head_on_host import BATCH, alike, generated, plan_with, played
from tests.support import save_tiny

pytestmark = pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler here")
RESIDENT, LONG = (2, 1, 1), replace(BATCH, max_new_tokens=40, limits=[40, 40, 40])


def _never_alone(known: Callable[[Plan], tuple[Schedule, ...]], plan: Plan) -> tuple[Schedule, ...]:
    """What a played card takes is nothing that a plan predicts."""
    return tuple(replace(one, predicted_s=1e6) if one.name == ALONE else one for one in known(plan))


def test_units_that_move_between_link_and_cpu_change_nothing_of_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_tiny(tmp_path / "model", "llama")
    plan = plan_with(checkpoint, RESIDENT, HostUnits(2, 3, 2, near=1))
    write_plan(plan, tmp_path / "plan.yaml")
    plan = replace(read_plan(tmp_path / "plan.yaml"), hardware=plan.hardware)
    later = partial(_never_alone, open_session.schedules_of)
    monkeypatch.setattr(open_session, "schedules_of", later)
    with played(monkeypatch) as card:
        want, _ = generated(plan_with(checkpoint, RESIDENT, HostUnits()), checkpoint, card)
        got, _ = generated(plan, checkpoint, card)
        with opened(plan, checkpoint, card, CPU) as session:
            session.load(LONG)
            for _ in range(2):
                session.generate(LONG, Sampler(Sampling(), CPU))
            steps = session.engine.facts()["graphs"]["schedules"]["steps"]
    alike(got, want)
    names = {OWN, "1 ffn on the CPU", "3 ffn on the CPU"}
    assert OWN in steps and len(steps) > 1 and set(steps) <= names, "how many are tried goes by what steps take here"
    assert sum(steps.values()) == 2 * 39


def test_a_plan_whose_units_a_user_counted_has_nothing_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_tiny(tmp_path / "model", "llama")
    plan = plan_with(checkpoint, RESIDENT, HostUnits(2, 3, 2))
    with played(monkeypatch) as card, opened(plan, checkpoint, card, CPU) as session:
        session.load(BATCH)
        session.generate(BATCH, Sampler(Sampling(), CPU))
        assert set(session.engine.facts()["graphs"]["schedules"]["steps"]) <= {OWN, ALONE}
