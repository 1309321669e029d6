"""What runs found corrects the profile of the machine that they ran on, and of no other."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

import penstock.planner.contract.lessons.learned
from penstock.planner.common.errors import UserError
from penstock.planner.common.origins import BY_HAND
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.config.config_schema import SolveConfig, WorkloadConfig
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.lessons.calibration import (
    KEPT_RUNS,
    CalibratingRun,
    Calibration,
    Machine,
    calibration_path,
    geometry_of,
    read_calibration,
    write_calibration,
)
from penstock.planner.contract.lessons.corrections import slowed
from penstock.planner.contract.lessons.interval import intervals
from penstock.planner.contract.lessons.learned import with_calibration
from penstock.planner.contract.lessons.spread import LEAST, UNSEEN, USUAL, spread, spread_of_runs
from penstock.planner.solver.planning import _reading, answer, read_question
from penstock.planner.solver.program import nearest_first, solve
from penstock.planner.solver.simple_choice import SAME, Gain, choose, gain
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, gpu, machine, model, work
from tests.planner.test_presets import hardware as preset
from tests.planner.test_presets import model as model_preset

DRIVE = "/dev/a, ext4, 1 TB"


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path))


def run(when: str = "2026-11-21 10:00", of=None, **figures: float) -> CalibratingRun:
    return CalibratingRun(when, "small", geometry_of(of or model()), DRIVE, **figures)


def keep(hardware: HardwareProfile, *runs: CalibratingRun) -> Path:
    path = calibration_path(hardware)
    write_calibration(path, Calibration(Machine.of(hardware), runs))
    return path


def test_a_machine_without_a_calibration_is_as_its_profile_says() -> None:
    assert with_calibration(machine(), model()) == (machine(), ())


def test_rates_are_those_that_the_run_found() -> None:
    hardware = machine()
    keep(hardware, run(ssd_gbps=3.5, h2d_gbps=27.5, weights_gbps=1600.0, pin_s_per_gb=0.4, pass_s=0.01, start_s=2.0))
    found, (note,) = with_calibration(hardware, model())
    assert [p.gbps for p in found.ssd_read] == [0.75, 2.5, 3.5]
    assert found.gpu.h2d.peak == 27.5 and found.dram_bus_gbps == hardware.dram_bus_gbps
    assert found.gpu.memory_gbps == 1600.0 and found.layer_launch_s == 1e-4
    assert (found.pin_s_per_gb, found.pass_s, found.start_s) == (0.4, 0.01, 2.0)
    assert found.gpu.dense_tflops == hardware.gpu.dense_tflops, "of which no run told"
    assert "by 1 run on this machine, the last on 2026-11-21 10:00" in note and "ssd 0.50" in note
    assert found.origin["ssd.read"].startswith("measured by 1 run")


def test_of_the_ssd_long_runs_tell() -> None:
    """Two that only loaded tell of half a minute; where no run says how much it read all count."""
    hardware, loads = machine(), [run(ssd_gbps=gbps, ssd_read_gb=40.0) for gbps in (6.8, 6.6)]
    for runs, gbps in (
        ([*loads, run(ssd_gbps=3.5, ssd_read_gb=160.0)], 3.5),
        ([*loads, run(ssd_gbps=3.5, ssd_read_gb=60.0)], 6.6),
        ([*loads, run(h2d_gbps=27.5)], (6.8 * 6.6) ** 0.5),
        ([run(ssd_gbps=gbps) for gbps in (6.8, 6.6, 3.5)], 6.6),
    ):
        keep(hardware, *runs)
        assert max(p.gbps for p in with_calibration(hardware, model())[0].ssd_read) == pytest.approx(gbps)


def test_of_several_runs_the_middle_counts_and_their_spread_is_known() -> None:
    hardware = machine()
    keep(hardware, *(run(ssd_gbps=rate) for rate in (6.9, 7.0, 7.1)))
    found, _ = with_calibration(hardware, model())
    assert max(p.gbps for p in found.ssd_read) == pytest.approx(7.0)
    assert 0.02 < found.spread["ssd"] == spread(found, Figure.ssd) < USUAL[Figure.ssd]
    keep(hardware, *(run(ssd_gbps=rate) for rate in (3.5, 7.0, 14.0)))
    assert with_calibration(hardware, model())[0].spread["ssd"] > 1
    assert spread_of_runs(Figure.ssd, [0.0]) == USUAL[Figure.ssd]


def test_a_run_that_contradicts_a_probe_makes_neither_certain_until_others_agree_and_a_datasheet_is_no_probe() -> None:
    spreads = []
    for origin, runs in (("measured 2026-11-21: so", 1), ("datasheet: a page", 1), ("measured 2026-11-21: so", 3)):
        hardware = replace(machine(), origin={"dram.pin_s_per_gb": origin})
        keep(hardware, *(run(pin_s_per_gb=hardware.pin_s_per_gb * 8),) * runs)
        spreads.append(with_calibration(hardware, model())[0].spread["page_lock"])
    assert spreads == pytest.approx([7.0, USUAL[Figure.page_lock], LEAST])


def test_compute_is_of_one_geometry_and_links_are_of_all() -> None:
    hardware = machine()
    keep(hardware, run(of=model(12), ssd_gbps=3.5, weights_gbps=400.0, pass_s=1.0))
    found, (note,) = with_calibration(hardware, model(8))
    assert found.gpu == hardware.gpu and found.pass_s == 0
    assert max(p.gbps for p in found.ssd_read) == 3.5
    assert "0 of them of this model's geometry" in note


def test_another_drive_has_a_rate_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hardware, there = machine(), replace(model(), checkpoint=str(tmp_path))
    keep(hardware, run(ssd_gbps=3.5, h2d_gbps=27.5))
    monkeypatch.setattr(penstock.planner.contract.lessons.learned, "drive_of", lambda path: "/dev/b, xfs, 2 TB")
    found, notes = with_calibration(hardware, there)
    assert found.ssd_read == hardware.ssd_read and found.gpu.h2d.peak == 27.5
    assert DRIVE in notes[1] and "/dev/b" in notes[1]
    monkeypatch.setattr(penstock.planner.contract.lessons.learned, "drive_of", lambda path: DRIVE)
    assert with_calibration(hardware, there)[0].ssd_read != hardware.ssd_read


@pytest.mark.parametrize("other", [replace(machine(), gpu=gpu(name="another")), machine(vram=0), replace(machine(), cpu_cores=9)])
def test_a_changed_machine_does_not_use_it(other: HardwareProfile) -> None:
    keep(machine(), run(ssd_gbps=3.5))
    found, (note,) = with_calibration(other, model())
    assert found == other
    assert "is of another machine" in note and "\n" not in note


def test_what_was_set_by_hand_is_not_corrected() -> None:
    keep(machine(), run(ssd_gbps=3.5, h2d_gbps=27.5))
    by_hand = replace(machine(), origin={"ssd.read": BY_HAND})
    found, _ = with_calibration(by_hand, model())
    assert found.ssd_read == by_hand.ssd_read and found.gpu.h2d.peak == 27.5


def test_a_profile_that_is_measured_again_is_corrected_by_what_it_still_lacks() -> None:
    keep(machine(), run(ssd_gbps=3.5))
    probed_again = slowed(machine(), {Figure.ssd: 2.0})
    assert with_calibration(probed_again, model())[0].ssd_read == probed_again.ssd_read


def test_only_the_newest_runs_are_kept() -> None:
    known = Calibration(Machine.of(machine()))
    for i in range(KEPT_RUNS + 3):
        known = known.with_run(run(str(i)))
    assert [r.when for r in known.runs] == [str(i) for i in range(3, KEPT_RUNS + 3)]


@pytest.mark.parametrize(
    "text, word",
    [
        ("{", "not readable as YAML"),
        ("[]", "not a calibration"),
        ("penstock_calibration: 2", "format 1"),
        ("penstock_calibration: 1\nruns: []", "machine"),
        ("penstock_calibration: 1\nmachine: {hardware: small, gpu: small, cpu_cores: 8}\nruns:\n- {when: a}", "model"),
        (
            "penstock_calibration: 1\nmachine: {hardware: small, gpu: small, cpu_cores: 8}\nruns:\n"
            "- {when: a, model: b, geometry: c, drive: d, ssd_gbps: -1.0}",
            "runs[0].ssd_gbps=-1.0",
        ),
    ],
)
def test_a_damaged_file_is_refused_in_one_line_with_the_remedy(text: str, word: str) -> None:
    path = calibration_path(machine())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        with_calibration(machine(), model())
    line = str(refused.value)
    assert word in line and str(path) in line and "delete it" in line and "\n" not in line


def test_what_is_written_is_what_is_read() -> None:
    path = keep(machine(), run(ssd_gbps=3.5, pass_s=0.0), run(products_tflops=12.5))
    assert read_calibration(path) == Calibration(Machine.of(machine()), (run(ssd_gbps=3.5, pass_s=0.0), run(products_tflops=12.5)))


def test_a_prediction_lies_within_its_interval_which_grows_with_the_spread() -> None:
    hardware, m, w = machine(vram=GB), model(12), work()
    decisions = solve(hardware, m, w)
    said = predict(hardware, m, w, decisions)
    narrow = intervals(replace(hardware, spread={str(f): 0.0 for f in Figure}), m, w, decisions)
    usual = intervals(hardware, m, w, decisions)
    for name in ("load_s", "prefill_s", "decode_s_per_token", "total_s"):
        assert getattr(narrow, name) == pytest.approx((getattr(said, name),) * 2)
        least, most = getattr(usual, name)
        assert least <= getattr(said, name) <= most
    assert usual.decode_s_per_token == pytest.approx((said.decode_s_per_token / 1.05, said.decode_s_per_token * 1.05))


def test_figures_that_nobody_measured_are_less_certain() -> None:
    hardware = replace(machine(), origin={"gpu": "datasheet: a page", "ssd.read": "measured 2026-11-21: so"})
    assert spread(hardware, Figure.h2d) > USUAL[Figure.h2d] and spread(hardware, Figure.ssd) == USUAL[Figure.ssd]


def test_the_simple_plan_fills_the_nearest_tier_first() -> None:
    hardware, m, w = machine(vram=GB, dram=GB), model(16), work()
    best = solve(hardware, m, w)
    simple = nearest_first(Question(hardware, m, w), best)
    vram = simple.weights.vram.resident_units
    assert vram.attn + vram.ffn >= best.weights.vram.resident_units.attn + best.weights.vram.resident_units.ffn
    assert simple.weights.vram.slots == 4 and simple.kv.reuse.vram_pages == 0
    assert gain(Question(hardware, m, w), best, best).promised == 0


def test_a_gain_that_hangs_on_an_uncertain_rate_is_doubtful_and_on_a_known_one_is_not() -> None:
    hardware, m, w = machine(vram=16 * GB), model(16), work()
    resident, streamed = solve(hardware, m, w), solve(hardware, m, w, Force(resident_attn=0, resident_ffn=0))
    sure = gain(Question(hardware, m, w), resident, streamed)
    assert 0 < sure.least <= sure.promised <= sure.most and not sure.doubtful
    slow = slowed(hardware, {Figure.weights: 10.0})
    assert gain(Question(slow, m, w), streamed, resident).promised <= SAME, "copies that hide behind compute gain nothing"


@pytest.mark.parametrize(
    "promised, least, doubtful",
    [(0.02, -0.1, True), (0.02, 0.001, False), (0.02, -0.001, True), (0.001, -0.1, True), (-0.002, -0.1, True), (0.001, -0.009, False)],
)
def test_only_what_is_better_everywhere_or_as_good_everywhere_is_no_doubtful_gain(promised: float, least: float, doubtful: bool) -> None:
    assert Gain(promised, least, promised).doubtful is doubtful


def chat(hardware: str, model: str) -> Question:
    return read_question(SolveConfig(preset(hardware), model_preset(model), WorkloadConfig("chat"))).question


def known_within(share: float, question: Question) -> Question:
    return question.on(replace(question.hardware, spread={str(figure): share for figure in Figure}))


def test_a_plan_that_a_slower_drive_would_undo_gives_way_to_the_simple_one() -> None:
    """It reads the SSD for as long as it copies, which saves some memory and no time. The card computes everything."""
    question = chat("rtx5080", "llama70b")
    question = replace(question.on(replace(question.hardware, dram_bytes=120 * GB)), force=Force(host_ffn=0))
    found = choose(question)
    fastest = choose(known_within(0.0, question))
    assert found.left is not None and found.decisions == nearest_first(question, fastest.decisions)
    assert fastest.left is None and found.decisions != fastest.decisions
    for factor in (1.0, 1.5):
        drive = slowed(question.hardware, {Figure.ssd: factor})
        simple, other = (predict(drive, question.model, question.workload, d).total_s for d in (found.decisions, fastest.decisions))
        assert simple <= other * 1.005 and (factor == 1.0 or simple < 0.95 * other)
    (note,) = answer(question).notes
    assert note.startswith("the simple plan (each tier filled, nearest first)")


def test_a_calibrated_machine_takes_the_plan_that_a_datasheet_left_in_doubt() -> None:
    question = chat("cpu", "mixtral8x7b")
    left = choose(question).left
    assert left is not None and left.promised > SAME
    taken = choose(known_within(0.05, question))
    assert taken.left is None and gain(question, taken.decisions, choose(question).decisions) == left


def test_plans_are_compared_on_one_machine_and_not_by_the_intervals_of_each() -> None:
    """What is wrong in a figure is wrong for both: a gain is certain long before the seconds are."""
    question = chat("h100", "qwen3-235b-a22b")
    found = choose(question)
    simple = nearest_first(question, found.decisions)
    mine, its = (intervals(question.hardware, question.model, question.workload, d).total_s for d in (found.decisions, simple))
    assert mine[1] > its[0], "each by itself covers the other"
    assert found.left is None and gain(question, found.decisions, simple).least > 0
    assert gain(question, simple, simple) == Gain(0.0, 0.0, 0.0)


def test_losses_and_gains_of_several_figures_add_up_as_squares() -> None:
    question = chat("cpu", "qwen3-30b-a3b")
    best = choose(known_within(0.0, question)).decisions
    simple = nearest_first(question, best)

    def alone(*figures: Figure) -> Gain:
        return gain(question.on(replace(question.hardware, spread={str(f): 0.5 * (f in figures) for f in Figure})), best, simple)

    both, reads, computing = (alone(*figures) for figures in ((Figure.ssd, Figure.weights), (Figure.ssd,), (Figure.weights,)))
    lost = [math.log1p(both.promised) - math.log1p(found.least) for found in (both, reads, computing)]
    assert lost[1] > 0.01 and lost[2] > 0.01 and lost[0] == pytest.approx(math.hypot(*lost[1:]))


def test_a_model_that_is_read_for_longer_than_the_drives_burst_is_planned_with_its_long_rate() -> None:
    """What no memory can hold of it is read in each pass."""
    drive = machine(dram=2 * GB, vram=GB, ssd_long_gbps=4.0, ssd_burst_s=0.2, origin={"ssd.read": "measured"})
    large = _reading(drive, model(40))
    assert (
        large.ssd_peak_gbps == 4.0 and large.ssd_read[0].gbps == 1.5 and "held to the drive's long rate, 4 GB/s" in large.origin["ssd.read"]
    )
    assert _reading(large, model(40)).ssd_read == large.ssd_read
    assert _reading(drive, model(8)) is drive and _reading(replace(drive, ssd_burst_s=60.0), model(40)).ssd_peak_gbps == 7.0
    assert _reading(machine(), model(40)) == machine()


def test_what_was_measured_on_a_busy_machine_is_no_surer_than_a_datasheet() -> None:
    calm = machine(origin={"ssd.read": "measured 2026-11-21: O_DIRECT"})
    busy = replace(calm, origin={"ssd.read": "measured 2026-11-21: O_DIRECT, busy, unsteady: 1 to 2 GB/s"})
    assert spread(calm, Figure.ssd) == USUAL[Figure.ssd] < spread(busy, Figure.ssd) == UNSEEN
