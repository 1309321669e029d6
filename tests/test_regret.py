"""The regret study runs each point as often as there is time for, and loses none: what failed or was not reached says why."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.neighbourhood import OURS, Point, neighbourhood, peers, sampled
from bench.regret import USUAL, Regime, Study, steps_of
from bench.regret_report import correlation, document, draw, verdict
from bench.worker import Failed, Measured, Trial, Worker, infer_device_map, measure
from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.rules.broken import broken_rules
from tests.cli import HANGS_S
from tests.runtime.fakes import LockingCopier
from tests.support import decisions, plan_for, save_tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("regret") / "tiny")


@pytest.fixture(scope="module")
def plan(checkpoint: Path) -> Plan:
    return plan_for(checkpoint, decisions(cap=2, hwm=5, distance=5))


@pytest.fixture(scope="module")
def card_plan(checkpoint: Path) -> Plan:
    return plan_for(checkpoint, decisions(gpu=True, resident=(2, 2, 0), cap=4, hwm=7, distance=4), gpu=True)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """Its process, which imports torch, is one for all that does not end it."""
    with closing(Worker(HANGS_S)) as made:
        yield made


def points(plan: Plan, *names: str) -> list[Point]:
    return [Point("here", name, plan) for name in (OURS, *names)]


class Runs:
    """Takes a second for a point; ``steps`` has what each measures, or how it fails."""

    def __init__(self, **steps: float | Exception):
        self.steps = steps
        self.now = 0.0
        self.ran: list[str] = []

    def __call__(self, point: Point) -> Measured:
        self.now += 1
        self.ran.append(point.name)
        outcome = self.steps.get(point.name, 1.0)
        if isinstance(outcome, Exception):
            raise outcome
        return Measured(outcome, 2.0)


def study(runs: Runs, **asked: int) -> Study:
    return Study(runs, USUAL | {"repeats": 2, "finals": 1} | asked, lambda: runs.now)


def test_every_point_is_run_in_each_repeat_and_the_best_ones_beside_the_plan_again(plan: Plan) -> None:
    runs, made = Runs(a=0.5, b=3.0, c=0.9), points(plan, "a", "b", "c")
    study(runs).measure(made)
    assert {p.name: (len(p.steps_s), len(p.finals_s)) for p in made} == {OURS: (2, 1), "a": (2, 1), "b": (2, 0), "c": (2, 1)}
    assert len(runs.ran) == 1 + 2 * 4 + 3


def test_a_point_that_fails_is_a_row_with_its_message_and_is_not_run_again(plan: Plan) -> None:
    runs, made = Runs(a=Failed("its process ended with status -9"), b=UserError("too small")), points(plan, "a", "b")
    study(runs).measure(made)
    assert [p.error for p in made] == [None, "its process ended with status -9", "too small"]
    assert runs.ran.count("a") == runs.ran.count("b") == 1
    rows = {row["name"]: row for row in document(made, {})["points"]}
    assert rows["a"]["error"] == made[1].error and rows["a"]["measured_s"] is None


def test_points_that_are_not_reached_in_time_are_told_and_the_plan_is_always_reached(plan: Plan) -> None:
    made = points(plan, *map(str, range(20)))
    study(Runs(), seconds=10, seed=3).measure(made)
    assert made[0].steps_s and 0 < sum(p.error == "not reached in seconds=10" for p in made) < 20
    assert all(bool(p.steps_s) != bool(p.error) for p in made)


def test_slow_points_get_fewer_steps_but_never_less_than_two() -> None:
    assert [steps_of(s, 8, 4) for s in (0.01, 0.5, 1.0, 60.0)] == [8, 6, 2, 2]


def test_regret_beyond_noise_is_what_the_worst_of_the_best_leaves_of_it(plan: Plan) -> None:
    made = points(plan, "a")
    made[0].steps_s, made[1].steps_s = [1.0, 1.2], [0.9, 1.1]
    facts = verdict(made)
    assert facts["regret"] == pytest.approx(1.1) and facts["best"] == "a" and facts["regret_beyond_noise"] == 1
    made[1].steps_s, made[1].finals_s, made[0].finals_s = [0.5, 0.8], [0.75], [0.9]
    facts = verdict(made)
    assert facts["regret_beyond_noise"] == pytest.approx(0.9 / 0.8) and facts["regret_of_finals"] == pytest.approx(1.2)


def test_equal_ranks_share_their_mean_and_one_value_has_no_correlation() -> None:
    assert correlation([1, 2, 3, 4], [10, 20, 30, 400]) == pytest.approx(1)
    assert correlation([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)
    assert correlation([1, 1], [1, 2]) is None


def test_a_prefill_is_predicted_as_that_of_a_first_batch_in_as_many_batches_as_a_point_takes(plan: Plan) -> None:
    batch = plan.decisions.batch
    many = replace(plan, workload=replace(plan.workload, requests=3 * batch))
    (one,), (three,) = points(plan)[:1], [Point("here", OURS, many)]
    assert three.waves == 3 and one.predicted_prefill_s == plan.prediction.ttft_s
    assert three.predicted_prefill_s == pytest.approx(3 * one.predicted_prefill_s)
    assert Point("here", OURS, None).predicted_prefill_s is None


def test_a_regime_has_a_name_or_is_called_by_its_budgets() -> None:
    assert Regime.parse("mixed@2GiB:3GiB") == Regime("mixed", "2GiB", "3GiB")
    assert Regime.parse(":400MB") == Regime(":400MB", "", "400MB")
    with pytest.raises(UserError, match="budgets=2GiB: must be VRAM:DRAM"):
        Regime.parse("2GiB")


def test_neighbours_keep_every_rule_and_differ(card_plan: Plan) -> None:
    around = neighbourhood("here", card_plan)
    assert len({p.plan.decisions for p in around}) == len(around) > 10
    assert not any(broken_rules(p.plan.hardware, p.plan.model, p.plan.workload, p.plan.decisions) for p in around[1:])


def test_a_sample_has_the_plan_and_the_peers_whatever_it_leaves_out(plan: Plan) -> None:
    made = [*points(plan, *map(str, range(30))), Point("here", "accelerate", plan, peer=True)]
    kept = sampled(made, 8, 0)
    assert len(kept) == 8 and kept[0].name == OURS and kept[-1].peer
    assert sampled(made, None, 0) == made


def test_accelerates_own_map_becomes_residents_and_llama_cpps_whole_layers_with_the_output(card_plan: Plan) -> None:
    asked = []

    def infer(room: dict[int | str, int]) -> dict[str, int | str]:
        asked.append(room)
        rest = {f"model.layers.{i}": "cpu" for i in range(2, card_plan.model.layers)}
        cut = {"model.layers.0": 0, "model.layers.1.self_attn": 0, "model.layers.1.mlp": "cpu"}
        return {"model.embed_tokens": 0, **cut, **rest, "model.norm": "cpu", "lm_head": "cpu"}

    accelerate, llama_cpp = peers("here", card_plan, infer)
    kept = accelerate.plan.decisions.weights
    assert (kept.vram.resident_units.attn, kept.vram.resident_units.ffn, kept.embedding) == (1, 1, Tier.vram)
    assert "1 layers on the card" in accelerate.name
    assert asked[0][0] == card_plan.hardware.vram_bytes - card_plan.hardware.gpu.context_bytes
    assert llama_cpp.plan.decisions.weights.vram.resident_units.head == card_plan.decisions.weights.head_blocks
    assert llama_cpp.name.startswith("llama.cpp: -ngl")


def test_a_worker_measures_a_plan_and_lives_through_a_crash_and_a_hang(plan: Plan, checkpoint: Path, worker: Worker) -> None:
    with pytest.raises(Failed, match="its process ended with status 7"):
        worker(os._exit, 7)
    with pytest.raises(Failed, match="ZeroDivisionError"):
        worker(divmod, 1, 0)
    with pytest.raises(UserError, match="DRAM"):
        worker(measure, Trial(_too_large(plan), checkpoint, 2, 0))
    assert worker(measure, Trial(plan, checkpoint, 2, 0)).prefill_s > 0
    with closing(Worker(0.5)) as hasty, pytest.raises(Failed, match="no answer in 0.5 s"):
        hasty(time.sleep, 60)


def test_accelerate_divides_a_model_over_dram_and_disk_by_itself(plan: Plan, checkpoint: Path, worker: Worker) -> None:
    pytest.importorskip("accelerate")
    where = worker(infer_device_map, checkpoint, {"cpu": plan.model.weight_bytes // 2})
    assert {"cpu", "disk"} <= set(where.values())


def test_a_plan_for_a_card_is_measured_through_the_cards_own_side(
    card_plan: Plan, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = LockingCopier()
    monkeypatch.setattr("penstock.runtime.memory.cuda.find_device", lambda plan, number=0: torch.device("cpu"))
    monkeypatch.setattr("penstock.runtime.memory.cuda.open_cuda", lambda plan, device: copier)
    for _ in range(2):
        assert measure(Trial(card_plan, checkpoint, 2, 0)).step_s > 0
    assert copier.aliased and copier.held == {}


def _too_large(plan: Plan) -> Plan:
    return replace(plan, prediction=replace(plan.prediction, dram_bytes=1 << 60))


def test_the_picture_and_the_document_have_every_regime(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = points(plan, "a", "b")
    study(Runs(a=0.5, b=UserError("no"))).measure(made)
    told = document(made, {"gpu": None})
    draw(made, told, tmp_path / "regret.png")
    assert told["budgets"]["here"]["points"] == 2 and told["budgets"]["here"]["without_figure"] == 1
    assert (tmp_path / "regret.png").stat().st_size > 5000
