"""A job is the plan's decisions for the work at hand: its batches, its room and its prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from planner.cost import predict
from planner.plan import Plan
from planner.planfile import write_plan
from planner.rules import broken_rules
from runtime.job import Job, prepare
from runtime.memory import free_dram
from runtime.order import read_order
from runtime.prompts import random_requests
from runtime.schema import RunConfig
from tests.support import decisions, plan_for, save_tiny, workload


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    checkpoint = save_tiny(tmp_path_factory.mktemp("model"))
    made = decisions(batch=4, pages=4 * 3, prefill_chunk_tokens=16)
    return plan_for(checkpoint, made, work=workload(batch=4, prompt_tokens=30, new_tokens=10, requests=6))


def job(plan: Plan, directory: Path, **keys: object) -> Job:
    write_plan(plan, directory / "plan.yaml")
    cfg = RunConfig(plan=str(directory / "plan.yaml"), out=str(directory / "run.json"), **keys)
    return prepare(cfg, read_order(cfg), torch.device("cpu"), free_dram())


def test_requests_come_in_the_plans_batches(plan: Plan, tmp_path: Path) -> None:
    made = job(plan, tmp_path)
    batches = list(made.batches())
    assert [len(b.prompts) for b in batches] == [4, 2]
    assert [p for b in batches for p in b.prompts] == [r.ids for r in made.requests]
    assert {(b.capacity, b.chunk_tokens, b.max_new_tokens, b.pad, b.stop_ids) for b in batches} == {(48, 16, 10, 0, frozenset())}


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_a_smaller_batch_keeps_each_sequences_room_and_breaks_no_rule(plan: Plan, tmp_path: Path, batch: int) -> None:
    made = job(plan, tmp_path, batch=batch)
    assert [len(b.prompts) for b in made.batches()] == [batch]
    assert made.plan.decisions.batch == batch and made.plan.decisions.kv.dram_pages == 3 * batch * plan.model.layers
    assert broken_rules(made.plan.hardware, made.plan.model, made.plan.workload, made.plan.decisions) == []


def test_the_prediction_is_for_the_work_at_hand(plan: Plan, tmp_path: Path) -> None:
    made = job(plan, tmp_path, batch=1, prompt_tokens=5, max_new_tokens=3)
    assert made.plan.workload == replace(plan.workload, batch=1, prompt_tokens=5, new_tokens=3, requests=1)
    cold = predict(plan.hardware, plan.model, made.plan.workload, made.plan.decisions)
    assert replace(made.plan.predicted, load_s=cold.load_s) == cold != plan.predicted
    assert made.plan.predicted.load_s <= cold.load_s, "this checkpoint was just written: it lies in the page cache, or nobody can say"
    assert made.plan.decisions.weights == plan.decisions.weights, "how weights move is the plan's"


def test_random_prompts_fit_the_vocabulary_and_the_room_and_repeat_with_a_seed() -> None:
    requests = random_requests(3, 50, 300, 40, seed=5)
    assert [(len(r.ids), r.cut) for r in requests] == [(40, 10)] * 3
    assert len({r.ids for r in requests}) == 3 and all(0 <= i < 300 for r in requests for i in r.ids)
    assert requests == random_requests(3, 50, 300, 40, seed=5) != random_requests(3, 50, 300, 40, seed=6)


def test_paths_may_begin_with_a_tilde(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan(replace(plan, model=replace(plan.model, digest=None)), tmp_path / "plan.yaml")
    (tmp_path / "model").symlink_to(plan.model.checkpoint)
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    order = read_order(RunConfig(plan="~/plan.yaml", checkpoint="~/model", prompts="~/prompts.txt", out="~/run.json"))
    assert (order.checkpoint, order.out, order.texts) == (tmp_path / "model", tmp_path / "run.json", ["one", "two"])
