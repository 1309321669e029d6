"""How the engine may move is held against the plan before anything is loaded, and shows in the report."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from penstock.planner.common.errors import UserError
from penstock.runtime.asked.knobs import check_engine
from penstock.runtime.asked.run_schema import EngineConfig
from penstock.runtime.serve import serve_verb
from penstock.runtime.tools import modes, runtime_verbs
from tests.cli import refusal
from tests.runtime.running import Desk, desk
from tests.runtime.sessions import opened
from tests.support import HostCopier, decisions, plan_for, save_tiny


@pytest.mark.parametrize(
    ("made", "engine", "says"),
    [
        ({}, {"balance_units": 3}, "=3: the plan copies 2 units ahead, so 1 to 2 are allowed; lower it, or raise force.vram"),
        ({}, {"balance_units": 0}, "engine.balance_units=0: must be 1 or more"),
        ({"vram_distance": 0}, {"balance_units": 2}, "so 1 to 1 are allowed"),
        ({"resident": (0, 0, 1)}, {"keep_finished_units": 4}, "with 4 slots a slot is wanted again after 4 units, so 0 to 3"),
        ({"resident": (0, 0, 1), "slots": 6}, {"keep_finished_units": 6}, "so 0 to 5 are allowed"),
        ({}, {"keep_finished_units": 3}, "after 3 units, so 0 to 2 are allowed"),
        ({}, {"keep_finished_units": -1}, "engine.keep_finished_units=-1: must be 0 or more"),
        ({}, {"warmup_layers": 5}, "engine.warmup_layers=5: the DRAM cache's first fill is 4 layers, so 0 to 4 are allowed"),
        ({}, {"warmup_layers": -1}, "engine.warmup_layers=-1: must be 0 or more"),
    ],
)
def test_what_cannot_work_with_the_plan_is_refused(checkpoint: Path, made: dict, engine: dict, says: str) -> None:
    plan = plan_for(checkpoint, decisions(gpu=True, **made), gpu=True)
    with pytest.raises(UserError, match="^[^\n]*$") as refused:
        check_engine(EngineConfig(**engine), plan)
    assert says in str(refused.value)


@pytest.mark.parametrize("engine", [{"balance_units": 2}, {"balance_units": None}, {"keep_finished_units": 2}, {"warmup_layers": 4}])
def test_what_can_is_not(checkpoint: Path, engine: dict) -> None:
    assert check_engine(EngineConfig(**engine), plan_for(checkpoint, decisions(gpu=True), gpu=True)) == []


def test_without_a_ring_its_keys_are_noted_as_idle_and_still_checked(checkpoint: Path) -> None:
    plan = plan_for(checkpoint, decisions())
    notes = check_engine(EngineConfig(balance_units=2, keep_finished_units=1), plan)
    assert [note.split()[0] for note in notes] == ["engine.balance_units", "engine.keep_finished_units"]
    assert check_engine(EngineConfig(), plan) == []
    with pytest.raises(UserError, match="balance_units=0"):
        check_engine(EngineConfig(balance_units=0), plan)


def test_a_run_refuses_before_it_loads(on_a_card: Desk) -> None:
    assert "keep_finished_units=9" in on_a_card.refusal(engine=EngineConfig(keep_finished_units=9))


@pytest.mark.parametrize("engine", [{"keep_finished_units": 2}, {"balance_units": 2}, {"warmup_layers": 0}, {"wrap_around": False}])
def test_no_key_changes_what_is_computed(on_a_card: Desk, engine: dict) -> None:
    report = on_a_card.run(engine=EngineConfig(**engine))
    assert report["tokens"] == on_a_card.run()["tokens"]
    launching = report["launching"]["prompts"]
    assert launching["passes"] >= len(report["prefill_each_s"]) and 0 < launching["first_s"] < report["prefill_each_s"][0]


@pytest.mark.parametrize("kept", [0, 2])
def test_a_slot_is_given_on_behind_so_many_units_that_are_kept(checkpoint: Path, kept: int) -> None:
    """The ring's own turns, as compute that leaves unit after unit gives them."""
    plan = plan_for(checkpoint, decisions(gpu=True, vram_distance=6, slots=6), gpu=True)
    with opened(plan, checkpoint, HostCopier(), keep_finished_units=kept) as session:
        turns, behind = session.engine.card.ring.turns, []
        turns.begun = 4
        for left in range(20):
            turns.entered = turns.left = turns.asked = left
            while turns.may_fetch() or turns.next_copy() is not None:
                if (number := turns.next_copy()) is None:
                    turns.fetched += 1
                    continue
                if (before := turns.before(number)) is not None:
                    behind.append(left - before)
                turns.copy(number)
        assert min(behind) == 1 + kept


def test_a_balance_shows_as_units_copied_before_their_turn(checkpoint: Path, tmp_path: Path, on_a_card: Desk) -> None:
    """Attention of most layers is resident: FFN units queue for their slots, and the attention units behind them need not."""
    made = decisions(gpu=True, resident=(4, 0, 0), vram_distance=4, slots=6)
    here = desk(tmp_path, plan_for(checkpoint, made, gpu=True))
    strict, free = (here.run(engine=EngineConfig(balance_units=n), rounds=10)["ring"] for n in (1, None))
    assert strict["out_of_turn"] == 0 < free["out_of_turn"]


def test_layers_that_were_awaited_are_counted(on_a_card: Desk) -> None:
    assert on_a_card.run()["cache"]["warm_layers"] == 4
    assert 2 <= on_a_card.run(engine=EngineConfig(warmup_layers=2))["cache"]["warm_layers"] <= 4


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("bench rounds=0", "rounds=0: must be 1 or more"),
        ("bench warmup_rounds=-1", "warmup_rounds=-1: must be 0 or more"),
        (f"bench rounds={10**9}", "must be at most 1e+06"),
        ("bench seed=-1", "seed=-1: must be 0 or more"),
        ("bench temperature=-1", "temperature=-1.0: must be 0 (greedy) or more"),
        ("bench prompt=a prompts=b", "are both given"),
        *((f"{verb} engine.balance_units=0", "engine.balance_units=0: must be 1 or more") for verb in ("bench", "chat", "serve")),
        *((f"{verb} kv.flush_s=-1", "kv.flush_s=-1.0: must be 0 or more") for verb in ("chat", "serve")),
        ("chat max_new_tokens=0", "max_new_tokens=0: must be 1 or more"),
    ],
)
def test_what_no_plan_could_mend_is_refused_before_one_is_solved(
    typed: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def solved(*_: object) -> NoReturn:
        raise AssertionError("a plan was asked for")

    for verbs in (modes, runtime_verbs, serve_verb):
        monkeypatch.setattr(verbs, "solve", solved)
    verb, *keys = typed.split()
    model = ["hardware=cpu", "model=hf", f"model.checkpoint={save_tiny(tmp_path / 'model')}"]
    assert line in refusal("runtime", verb, *model, *keys, cwd=tmp_path)
