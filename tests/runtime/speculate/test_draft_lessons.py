"""What a calibrating run saw of drafts is what the next plan counts on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import verify_s
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.lessons.calibration import (
    CalibratingRun,
    Calibration,
    Machine,
    calibration_path,
    geometry_of,
    write_calibration,
)
from penstock.planner.contract.lessons.draft_lesson import DraftLesson, counting_on
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.speculation.acceptance import Acceptance
from penstock.planner.contract.speculation.chain_length import ChainLength
from penstock.planner.contract.speculation.drafting import counted_s, counted_tokens
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.speculate.chains import Chains
from penstock.runtime.speculate.drafter import Drafts


@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4), st.floats(0.2, 1.0), st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_what_one_run_saw_of_drafts_predicts_the_next_one(places: list[float], proposes: float, seed: int) -> None:
    """Tokens a second of passes whose seconds are played, after one run on other text of the kind: within a tenth."""
    rightly, drafts, each_s = [*places, *[places[-1]] * 8], 6, 0.05

    def played(chance: random.Random) -> tuple[Chains, float]:
        chains, seconds = Chains("lookup", Proposes(proposes, chance), Fixed(drafts, lambda k: 1.0, Acceptance(0.3))), 0.0
        for _ in range(1500):
            (draft,) = chains.draft([KvSequence.of(0, [1])], [100])
            kept = next((k for k in range(len(draft)) if chance.random() >= rightly[k]), len(draft))
            chains.book([draft], [[0] * (kept + 1)], 1.0 + each_s * len(draft))
            seconds += 1.0 + each_s * len(draft)
        return chains, chains.counts.tokens / seconds

    first, _ = played(random.Random(seed))
    default = Speculation(Drafter.lookup, drafts, 0.3)
    lesson = DraftLesson.of(default, "chat", vars(first.counts))
    assert lesson is not None
    known = counting_on(default, [lesson, replace(lesson, text="code", kept=lesson.tried), replace(lesson, drafter="x")], "chat")
    _, measured = played(random.Random(seed + 1))
    predicted = counted_tokens(known, drafts) / counted_s(known, 1.0, 1.0 + each_s * drafts)
    assert 0.9 <= predicted / measured <= 1.1
    assert known.acceptance <= sum(lesson.kept) / sum(lesson.tried)


def test_the_next_solve_counts_on_what_runs_saw_of_this_kind_of_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path))
    asked: dict[str, Any] = {"model": "llama70b", "hardware": "rtx5080", "speculate": "lookup"}
    plain = penstock.solve(**asked)
    lesson = DraftLesson("lookup", plain.workload.name, 400, 300, (300, 240, 230), (240, 230, 60))
    run = CalibratingRun("now", plain.model.name, geometry_of(plain.model), "drive", drafts=lesson)
    write_calibration(calibration_path(plain.hardware), Calibration(Machine.of(plain.hardware), (run,)))
    known, other = penstock.solve(**asked), penstock.solve(**asked, **{"workload.name": "code"})
    said = known.decisions.speculation
    assert said.acceptance <= 530 / 770 and said.proposes == 0.75 and len(said.acceptance_at) == 3
    assert known.prediction.drafts_kept == said.acceptance and known.prediction.tokens_a_pass > plain.prediction.tokens_a_pass
    assert "as 1 run on text of the kind" in known.notes[-1] and "before a run" in plain.notes[-1]
    assert other.decisions.speculation == plain.decisions.speculation
    assert penstock.solve(**asked, calibration="off").decisions.speculation == plain.decisions.speculation
    silent = replace(run, drafts=DraftLesson("lookup", plain.workload.name, 40, 0, (), ()))
    write_calibration(calibration_path(plain.hardware), Calibration(Machine.of(plain.hardware), (silent,)))
    assert penstock.solve(**asked).prediction.tokens_a_pass == 1
    write_plan(known, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml").prediction == known.prediction


def test_a_drafter_that_runs_have_timed_costs_what_they_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they found of the model beside it, and however far its price is off. Several sequences at once have no such run."""
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path))
    asked: dict[str, Any] = {"model": "llama8b", "hardware": "rtx4090", "speculate": "self", "hardware.vram_bytes": 12 * 2**30}
    asked |= {
        "workload.batch": 1,
        "workload.requests": 1,
        "workload.context_tokens": 0,
        "workload.prompt_tokens": 64,
        "workload.new_tokens": 64,
    }
    priced = penstock.solve(**asked)
    decided, drafter = priced.decisions.speculation, priced.drafter
    assert drafter is not None and decided.step_s == 0
    facts = {"asked": 90, "proposed": 90, "tried_at": [90], "kept_at": [72], "drafted": 90, "passes": 100, "rows": 100, "draft_s": 0.45}
    lesson = DraftLesson.of(decided, "another kind", facts)
    assert lesson is not None and lesson.step_s == pytest.approx(0.005)
    two_at_once = DraftLesson.of(decided, "another kind", {**facts, "rows": 200})
    assert two_at_once is not None and two_at_once.step_s is None
    run = CalibratingRun("now", priced.model.name, geometry_of(priced.model), "drive", weights_gbps=100.0, pass_s=0.001, drafts=lesson)
    write_calibration(calibration_path(priced.hardware), Calibration(Machine.of(priced.hardware), (run,)))
    three, four = (penstock.solve(**asked, **{"force.speculate_tokens": k}) for k in (3, 4))
    wider_s = verify_s(*without_drafter(four)) - verify_s(*without_drafter(three))
    more_s = four.prediction.decode_s_per_token - three.prediction.decode_s_per_token
    assert more_s - wider_s == pytest.approx(0.005)
    assert penstock.solve(**{**asked, "workload.batch": 2, "workload.requests": 2}).decisions.speculation.step_s == 0
    write_plan(four, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml").prediction == four.prediction
    text = calibration_path(priced.hardware).read_text()
    calibration_path(priced.hardware).write_text(text.replace("step_s: 0.005", "step_s: -0.005"))
    with pytest.raises(UserError, match="drafts.step_s=-0.005: must be above 0"):
        penstock.solve(**asked)


def without_drafter(plan: Plan) -> tuple[HardwareProfile, ModelSpec, Workload, Decisions]:
    """What ``plan`` verifies, whoever drafts."""
    return plan.hardware, plan.model, plan.workload, replace(plan.decisions, speculation=plan.decisions.speculation.beside)


class Proposes:
    """Has a proposal now and then."""

    def __init__(self, share: float, chance: random.Random):
        self._share, self._chance = share, chance

    def read(self, rows: Sequence[KvSequence]) -> None:
        """Nothing is remembered."""

    def propose(self, rows: Sequence[KvSequence], most: Sequence[int]) -> Drafts:
        return [[0] * count if self._chance.random() < self._share else [] for count in most]

    def forget(self, number: int) -> None:
        """Nothing is remembered."""


class Fixed(ChainLength):
    def choose(self) -> int:
        return self.most
