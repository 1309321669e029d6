"""`runtime run calibrate=true`: what the real engine measured is what `planner solve` goes by."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest
import yaml

import penstock.runtime.told.calibrate
from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import KvPages, SsdReads
from penstock.planner.contract.lessons.calibration import calibration_path
from penstock.planner.contract.lessons.fit import Measured, fit
from penstock.planner.contract.lessons.learned import with_calibration
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import write_plan
from penstock.planner.contract.prices.stages import Stage
from penstock.planner.contract.speculation.chain_length import ChainLength
from penstock.runtime.told.calibrate import with_planned_bytes
from tests.runtime.fakes import LockingCopier
from tests.runtime.faults import put_in
from tests.runtime.running import Desk, desk
from tests.support import GPU, decisions, machine, plan_for, save_tiny, workload


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers large enough that a run moves what tells of a rate."""
    return save_tiny(tmp_path_factory.mktemp("learn"), hidden_size=512, intermediate_size=1536, head_dim=128)


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path / "config"


@pytest.fixture
def plan(checkpoint: Path) -> Plan:
    made = decisions(cap=1, hwm=4, distance=3, pages=8)
    large_blocks = replace(made, weights=replace(made.weights, ssd=SsdReads(1 << 20, 4, 4 << 20)))
    return plan_for(checkpoint, large_blocks, work=workload(new_tokens=12))


@pytest.fixture
def here(tmp_path: Path, plan: Plan) -> Desk:
    return desk(tmp_path, plan)


def test_a_run_that_is_not_asked_to_keeps_nothing(here: Desk, own_config: Path) -> None:
    assert here.run()["calibration"] is None
    assert not own_config.exists()


def test_what_a_run_measured_is_what_the_next_plan_is_made_of(here: Desk, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    report = here.run(calibrate=True)
    out = capsys.readouterr().out
    assert re.search(r"calibrated: .*ssd \d", out) and json.loads(out.splitlines()[-1])["report"]
    path = calibration_path(plan.hardware)
    (run,) = yaml.safe_load(path.read_text())["runs"]
    assert {"ssd_gbps", "ssd_read_gb", "weights_gbps", "pass_s", "start_s", "drive", "when"} <= set(run)
    hardware, notes = with_calibration(plan.hardware, plan.model)
    assert max(p.gbps for p in hardware.ssd_read) == pytest.approx(report["calibration"]["ssd_gbps"], rel=1e-3)
    assert hardware.cpu_matvec_gbps == pytest.approx(report["calibration"]["weights_gbps"], rel=1e-3)
    assert hardware.pass_s == pytest.approx(report["calibration"]["pass_s"], rel=1e-3)
    assert "calibrated by 1 run on this machine" in notes[0] and "calibration=off" in notes[0]


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    """What each run teaches, as it is given to the fit."""
    seen: list[Measured] = []
    monkeypatch.setattr(penstock.runtime.told.calibrate, "fit", lambda *given: seen.append(given[-1]) or fit(*given))
    return seen


def test_the_corrected_profile_predicts_the_run_that_corrected_it(here: Desk, plan: Plan, learnt: list[Measured]) -> None:
    report = here.run(calibrate=True)
    hardware, _ = with_calibration(plan.hardware, plan.model)
    said = predict(hardware, plan.model, plan.workload, plan.decisions)
    slowest = max(learnt[0].decode.values())  # no step is predicted shorter than its slowest stage
    assert said.decode_s_per_token == pytest.approx(max(learnt[0].decode_s, slowest), rel=1e-3)
    ahead = plan.decisions.weights.dram.prefetch_distance / (len(report["step_s"]) * (plan.model.layers - 1))
    assert learnt[0].decode_s == pytest.approx(median(report["step_s"]), rel=ahead), "less what was read for a step that did not come"


def test_a_second_run_is_kept_beside_the_first_also_when_its_plan_was_calibrated(here: Desk, plan: Plan) -> None:
    here.run(calibrate=True)
    hardware, _ = with_calibration(plan.hardware, plan.model)
    write_plan(replace(plan, hardware=hardware), here.plan)
    told = here.run(calibrate=True)["calibration"]
    first, second = yaml.safe_load(calibration_path(plan.hardware).read_text())["runs"]
    assert first["weights_gbps"] == pytest.approx(hardware.cpu_matvec_gbps, rel=1e-3)
    assert second["weights_gbps"] == pytest.approx(told["of_profile"]["weights"] * hardware.cpu_matvec_gbps, rel=1e-3)
    assert "by 2 runs" in with_calibration(plan.hardware, plan.model)[1][0]


def test_of_several_prompts_the_first_teaches_nothing(here: Desk, plan: Plan, learnt: list[Measured]) -> None:
    write_plan(replace(plan, workload=replace(plan.workload, requests=3)), here.plan)
    report = here.run(calibrate=True)
    assert len(report["prefill_each_s"]) == 3
    told = learnt.pop()
    assert told.prefill_s == pytest.approx(median(report["prefill_each_s"][1:]))
    assert 0 < told.prefill[Stage.compute] <= told.prefill_s
    write_plan(plan, here.plan)
    assert here.run(calibrate=True)["prefill_each_s"] == [learnt.pop().prefill_s]


def test_what_a_drafter_read_of_prompts_is_not_of_the_steps(
    checkpoint: Path, tmp_path: Path, learnt: list[Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChainLength, "choose", lambda self: 2)
    whole = plan_for(checkpoint, decisions(cap=4, hwm=7, distance=4, pages=8), work=workload(new_tokens=12))
    report = desk(tmp_path, whole).run(calibrate=True, speculate="draft", draft=str(checkpoint))
    drafts = report["speculation"]
    assert drafts["read_s"] > 0
    assert learnt[0].decode_s == pytest.approx(fmean(report["step_s"]) - drafts["read_s"] / drafts["passes"])
    assert report["calibration"]["drafts"]["step_s"] == pytest.approx(drafts["draft_s"] / drafts["drafted"])


def test_another_machines_file_is_not_added_to(here: Desk, plan: Plan) -> None:
    path = calibration_path(plan.hardware)
    path.parent.mkdir(parents=True)
    path.write_text("penstock_calibration: 1\nmachine: {hardware: test, gpu: another card, cpu_cores: 2}\nruns: []\n")
    before = path.read_text()
    assert "another machine" in here.refusal(calibrate=True)
    assert path.read_text() == before


def test_a_damaged_file_is_refused_before_anything_is_loaded(here: Desk, plan: Plan) -> None:
    path = calibration_path(plan.hardware)
    path.parent.mkdir(parents=True)
    path.write_text("penstock_calibration: 1\nmachine: [\n")
    assert "not readable as YAML" in here.refusal(calibrate=True)


def test_a_card_that_is_not_the_plans_teaches_nothing(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    import torch

    from penstock.runtime.told.calibrate import check_card

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another card")
    with pytest.raises(UserError, match="the plan's GPU is a card, this one another card"):
        check_card(replace(plan, hardware=machine(gpu=True)), torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU.name)
    check_card(replace(plan, hardware=machine(gpu=True)), torch.device("cuda", 0))


def test_a_run_that_moves_little_tells_of_compute_alone(tmp_path: Path) -> None:
    tiny = save_tiny(tmp_path / "moe", "mixtral")
    report = desk(tmp_path, plan_for(tiny, decisions(pages=8))).run(calibrate=True)
    assert report["measured"]["ssd_bytes_per_token"] > 0
    assert set(report["calibration"]["of_profile"]) <= {"weights", "products"}


def test_on_a_card_the_link_and_the_kv_that_streams_teach_their_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.runtime.told.calibrate, "LEAST_BYTES", 1)
    put_in(monkeypatch, LockingCopier())
    made = decisions(gpu=True, resident=(2, 2, 0), head_blocks=1)
    plan = plan_for(save_tiny(tmp_path / "dense"), replace(made, kv=KvPages(64, 2, 4, 0)), True, workload(kv_spill=True))
    told = desk(tmp_path, plan).run(calibrate=True)["calibration"]
    assert {"h2d", "d2h", "weights", "page_lock"} <= set(told["of_profile"])
    hardware, _ = with_calibration(plan.hardware, plan.model)
    assert hardware.gpu.h2d.peak == pytest.approx(told["h2d_gbps"], rel=1e-3)


def test_a_step_is_shorter_by_what_its_busiest_link_moved_beyond_the_plan() -> None:
    """Of 0.125 s the link copied for 0.115, half as much again as planned."""
    busy = {Stage.compute: 0.024, Stage.ssd: 0.05, Stage.h2d: 0.115}
    planned, step_s = with_planned_bytes(busy, 0.125, {Stage.ssd: 0.5, Stage.h2d: 2 / 3})
    assert planned == pytest.approx({Stage.compute: 0.024, Stage.ssd: 0.025, Stage.h2d: 0.115 * 2 / 3})
    assert step_s == pytest.approx(0.01 + 0.115 * 2 / 3)
    assert with_planned_bytes({Stage.compute: 0.02}, 0.03, {}) == ({Stage.compute: 0.02}, 0.03)
    assert with_planned_bytes({Stage.h2d: 0.02}, 0.03, {Stage.h2d: 1.5})[1] == pytest.approx(0.04)


def test_prompts_that_were_not_foreseen_teach_nothing_of_the_prefill(here: Desk, tmp_path: Path) -> None:
    unequal = tmp_path / "prompts.jsonl"
    unequal.write_text('{"tokens": [5, 6, 7]}\n{"tokens": [5, 6, 7, 8, 9, 10, 11]}\n')
    told = here.run(calibrate=True, prompts=str(unequal))["calibration"]
    assert "products" not in told["of_profile"] and "weights" in told["of_profile"]
