"""A plan acted out: no link is faster than its rate, repeats are exact, and the demonstrations show what they are about."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.common.errors import UserError
from penstock.planner.common.timeline.spans import COMPUTE, H2D, KV, SSD, SSD_WRITE
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.bills.prefill import Prefill
from penstock.planner.contract.bills.ring_slots import head_start
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.prices.price import Resource, computing_of
from penstock.planner.contract.prices.stages import decode_compute_s, prefill_compute_s
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Acted, Options
from penstock.planner.simulate.lanes.lanes import NS, Lanes, Work
from penstock.planner.simulate.outcome import Told
from penstock.planner.simulate.simulated_work import passes_of
from penstock.planner.solver.program import solve
from penstock.planner.verbs.simulation_length import Hint, check_length
from tests.cli import HANGS_S, ROOT, command, refusal
from tests.planner import small

GB = small.GB
DEMOS = sorted(path.name.removesuffix(".yaml") for path in resources.files("conf").joinpath("demo").iterdir())
CASES: dict[str, dict[str, Any]] = {
    "streams from the SSD": {"hardware": {"vram": GB, "dram": GB}},
    "streams from DRAM": {"hardware": {"vram": GB}, "force": Force(resident_ffn=1)},
    "all in VRAM": {},
    "rolls": {"hardware": {"vram": GB, "dram": 3 * GB}, "force": Force(policy="rolling", cap_layers=4, prefetch_distance=5)},
    "without a GPU": {"hardware": {"vram": 0, "dram": 1500 * small.MB}},
    "KV streams": {
        "hardware": {"vram": 1400 * small.MB, "dram": 8 * GB},
        "work": {"kv_spill": True, "prompt_tokens": 4096, "batch": 16, "new_tokens": 300},
    },
    "KV on the SSD, without a GPU": {
        "hardware": {"vram": 0, "dram": 1300 * small.MB},
        "work": {"kv_spill": True, "prompt_tokens": 4096, "batch": 8, "new_tokens": 200},
    },
    "several batches": {"hardware": {"vram": 0, "dram": 1500 * small.MB}, "work": {"requests": 7, "batch": 2, "new_tokens": 40}},
    "a prompt in many passes": {"hardware": {"vram": GB, "dram": 2 * GB}, "force": Force(prefill_chunk_tokens=64)},
    "torch attends without a GPU": {"hardware": {"vram": 0, "cpu_attention_gbps": 2.0, "cpu_attention_tflops": 0.1}, "work": {"batch": 4}},
    "a card that has rested": {"hardware": {"gpu": small.gpu(burst_tflops=150.0, burst_s=2e-3)}, "force": Force(prefill_chunk_tokens=64)},
}  # fmt: skip


@cache
def planned(case: str) -> Plan:
    asked = CASES[case]
    hardware, model, work = small.machine(**asked.get("hardware", {})), small.model(layers=12), small.work(**asked.get("work", {}))
    made = solve(hardware, model, work, asked.get("force", Force()))
    return Plan(hardware, model, work, made, predict(hardware, model, work, made))


def acted(plan: Plan, **options: bool) -> Acted:
    return Simulation(plan, Options(**options)).run()


def test_the_cases_are_what_they_are_called() -> None:
    assert planned("streams from the SSD").placement.ssd_layers and planned("without a GPU").placement.ssd_layers
    assert planned("streams from DRAM").placement.streamed_units and not planned("streams from DRAM").placement.ssd_layers
    assert not planned("all in VRAM").placement.streamed_units
    assert planned("KV streams").decisions.kv.dram_pages > 0
    assert planned("KV on the SSD, without a GPU").decisions.kv.ssd_pages > 0
    assert planned("a prompt in many passes").decisions.prefill_chunk_tokens == 64


@pytest.mark.parametrize("case", CASES)
def test_passes_that_are_counted_are_exactly_those_that_would_be_acted_out(case: str) -> None:
    brief, whole = acted(planned(case), keep_log=True), acted(planned(case), keep_log=True, skip=False)
    runs = passes_of(whole.plan, tuple(unit for unit, _ in whole.plan.placement.units), 1)
    prefills = sum(run.count for run in runs if run.each.prefill) * len(whole.record.prefill_ns)
    assert brief.acted_passes <= whole.acted_passes == len(whole.record.step_ns) + prefills
    assert brief.record == whole.record
    assert brief.cache == whole.cache


@pytest.mark.parametrize("case", CASES)
def test_a_simulation_moves_the_bytes_of_the_closed_form_and_is_no_faster_than_any_stage(case: str) -> None:
    plan = planned(case)
    told, p = Told(acted(plan)), plan.prediction
    fills = plan.workload.new_tokens - 1
    kept = plan.placement.dram_slots * plan.placement.dram_slot_bytes
    read = told.figures["ssd_bytes_per_token"]
    assert read == pytest.approx(p.ssd_bytes_per_token, rel=0.01, abs=kept / fills + 1)
    ahead = plan.decisions.weights.vram.slots * plan.model.ffn_max
    assert told.figures["h2d_bytes_per_token"] == pytest.approx(p.h2d_bytes_per_token, rel=0.01, abs=ahead / fills + 1)
    for stage in (Resource.h2d, computing_of(plan.hardware)):
        assert told.figures["decode_s_per_token"] >= 0.98 * p.decode_stages[stage] - p.decode_stages[stage] / fills


@pytest.mark.parametrize("case", CASES)
def test_where_one_stage_binds_the_seconds_are_those_of_the_closed_form(case: str) -> None:
    plan = planned(case)
    assert Told(acted(plan)).figures["decode_s_per_token"] == pytest.approx(plan.prediction.decode_s_per_token, rel=0.05)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("rolls", "several batches")])
def test_the_first_token_is_predicted_as_it_is_acted_out_with_slots_that_are_full(case: str) -> None:
    plan = planned(case)
    assert Told(acted(plan)).figures["ttft_s"] == pytest.approx(plan.prediction.ttft_s, rel=0.05)


def test_a_step_that_verifies_is_as_long_as_the_closed_form_says_and_there_are_fewer_of_them() -> None:
    for case in ("streams from the SSD", "without a GPU"):
        plan = planned(case)
        decisions = replace(plan.decisions, speculation=Speculation(Drafter.lookup, 3, 0.6))
        drafted = replace(plan, decisions=decisions, prediction=predict(plan.hardware, plan.model, plan.workload, decisions))
        before, after = Told(acted(plan)), Told(acted(drafted))
        steps = len(after.acted.record.step_ns)
        assert steps == round((plan.workload.new_tokens - 1) / drafted.prediction.tokens_a_pass) < len(before.acted.record.step_ns)
        for name in ("decode_s_per_token", "decode_tokens_per_s"):
            found, closed = after.figures[name], after.closed(name)
            assert found is not None and closed is not None and found == pytest.approx(closed, rel=0.1)
        assert after.total_s < before.total_s


def test_what_lies_in_slots_is_saved_by_the_first_batch_alone() -> None:
    plan = planned("streams from the SSD")
    two = predict(plan.hardware, plan.model, replace(plan.workload, requests=2 * plan.decisions.batch), plan.decisions)
    assert plan.prediction.ttft_s < 0.9 * plan.prediction.prefill_s
    assert two.ttft_s == pytest.approx((plan.prediction.ttft_s + plan.prediction.prefill_s) / 2)
    assert two.prefill_s == plan.prediction.prefill_s and two.decode_s_per_token == plan.prediction.decode_s_per_token


def test_a_window_that_is_filled_with_less_than_it_keeps_is_filled_by_the_first_pass() -> None:
    plan = planned("rolls")
    assert not plan.placement.ssd_layers
    assert head_start(plan.hardware, plan.model, plan.decisions).ssd_s < 0
    assert plan.prediction.prefill_s < plan.prediction.ttft_s <= Told(acted(plan)).figures["ttft_s"]


@pytest.mark.parametrize("case", CASES)
def test_compute_of_all_units_of_all_passes_is_that_of_the_closed_form(case: str) -> None:
    plan = planned(case)
    units = tuple(unit for unit, _ in plan.placement.units)
    runs = passes_of(plan, units, plan.decisions.batch)
    step_s = [sum(run.each.unit_ns) / NS for run in runs if not run.each.prefill for _ in range(run.count)]
    steps = replace(plan.workload, new_tokens=plan.workload.new_tokens - 1)
    want = decode_compute_s(plan.hardware, plan.model, steps, plan.decisions.batch)
    assert sum(step_s) / len(step_s) == pytest.approx(want, rel=1e-3)
    assert len(step_s) == plan.workload.new_tokens - 1
    whole = prefill_compute_s(plan.hardware, plan.model, plan.workload, plan.decisions.batch, plan.decisions.prefill_chunk_tokens)
    assert sum(sum(run.each.unit_ns) for run in runs if run.each.prefill) / NS == pytest.approx(whole, rel=0.05)
    assert Prefill(plan.hardware, plan.model, plan.workload, plan.decisions).bill().of(computing_of(plan.hardware)) >= whole * (1 - 1e-12)


@given(st.floats(0.1, 1), st.floats(0.1, 1), st.integers(10**6, 10**9), st.integers(10**6, 10**9))
def test_reads_and_copies_that_begin_together_share_the_bus_until_one_has_nothing_left(
    ssd: float, h2d: float, read: int, copy: int
) -> None:
    ends: dict[str, int] = {}
    lanes = Lanes({SSD: ssd, H2D: h2d}, {})
    for track, length in ((SSD, read), (H2D, copy), (COMPUTE, read)):
        lanes.add(track, Work((track,), track, 0, lambda track=track: ends.setdefault(track, lanes.now)), length)
    while lanes.step():
        pass
    slower = max(1.0, ssd + h2d)
    first = min(read, copy) * slower
    assert (min(ends[SSD], ends[H2D]), max(ends[SSD], ends[H2D])) == pytest.approx((first, first + abs(read - copy)), rel=1e-5)
    assert ends[COMPUTE] == read, "a card's compute takes nothing of the bus"
    bus_ns = ssd * read + h2d * copy
    assert max(ends.values()) >= max(read, copy, bus_ns) * (1 - 1e-5), "never sooner than the slowest resource"


def test_lanes_of_one_link_share_it_and_others_do_not() -> None:
    ends: dict[str, int] = {}
    lanes = Lanes({}, {})
    for track in (SSD, SSD_WRITE, H2D, KV, COMPUTE):
        for _ in range(2):
            lanes.add(track, Work((), "", 1, lambda track=track: ends.update({track: lanes.now})), 100)
    while lanes.step():
        pass
    assert ends == {SSD: 400, SSD_WRITE: 400, H2D: 400, KV: 400, COMPUTE: 200}
    assert lanes.of[SSD].nbytes == 2 and lanes.of[COMPUTE].busy_ns == 200


def shipped(demo: str) -> tuple[Plan, Plan]:
    """The demonstration's plan as it ships, and as it is changed."""
    conf = resources.files("conf")
    values = yaml.safe_load(conf.joinpath("demo", f"{demo}.yaml").read_text(encoding="utf-8"))
    with resources.as_file(conf.joinpath("plans", f"{values['plan']}.yaml")) as path:
        plan = read_plan(path)
    given = {name: values[name] for name in ("cap_layers", "hwm_layers", "prefetch_distance") if name in values}
    return plan, replace(plan, decisions=Force(**given).apply(plan.decisions, plan.model.layers))


def test_a_window_of_50_over_80_layers_stays_within_50_to_55_and_evicts_only_out_of_it() -> None:
    plan, same = shipped("rolling-50-55")
    dram = plan.decisions.weights.dram
    assert (plan.model.layers, dram.cap_layers, dram.hwm_layers, dram.prefetch_distance) == (80, 50, 55, 50)
    assert plan == same and not broken_rules(plan.hardware, plan.model, plan.workload, plan.decisions)
    found = acted(plan)
    low, high = found.record.held
    assert 50 <= low < high == 55 == found.cache.peak_layers
    assert found.cache.evictions_in_window == 0 < found.cache.evictions_out_of_window
    assert found.cache.misses == 0


@pytest.mark.parametrize("demo", [demo for demo in DEMOS if demo != "rolling-50-55"])
def test_each_wrong_configuration_costs_bytes_and_seconds(demo: str) -> None:
    right, wrong = (Told(acted(plan)) for plan in shipped(demo))
    assert wrong.read_bytes > right.read_bytes and wrong.total_s > right.total_s
    if demo == "window-over-capacity":
        assert wrong.acted.cache.evictions_in_window > 0 and wrong.read_bytes > 10 * right.read_bytes
    if demo == "hwm-at-cap":
        assert wrong.acted.cache.shrinks == wrong.acted.cache.accesses > 4 * right.acted.cache.shrinks


def test_ten_thousand_tokens_of_a_70b_plan_are_mostly_counted() -> None:
    plan, _ = shipped("rolling-50-55")
    found = acted(replace(plan, workload=replace(plan.workload, new_tokens=10_000)))
    assert len(found.record.step_ns) == 9_999 and found.acted_passes < 700


def test_simulate_tells_compares_and_ends_with_one_json_line(tmp_path: Path) -> None:
    result = command("planner", "simulate", "demo=hwm-at-cap", "rules=warn", "out=told.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and "\x1b" not in result.stdout
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads((tmp_path / "told.json").read_text())
    assert document["rules_broken"] == ["hwm = cap + k, 3 <= k <= 10"] and document["closed_form"] is None
    assert document["damage"]["seconds"] > 0 < document["damage"]["ssd_bytes"]
    assert document["before"]["ratio"]["decode_s_per_token"] == pytest.approx(1, rel=0.01)
    assert "warning: the plan breaks a rule (hwm = cap + k" in result.stdout


def test_a_plan_file_is_acted_out_without_torch_and_drawn(tmp_path: Path) -> None:
    write_plan(planned("streams from the SSD"), tmp_path / "plan.yaml")
    code = (
        "import sys, atexit; sys.argv = ['planner', 'simulate', 'plan=plan.yaml', 'trace=sim.json'];"
        "atexit.register(lambda: print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'transformers', 'runtime'})));"
        "from penstock.planner.cli import main; main()"
    )
    import subprocess
    import sys

    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
                            capture_output=True, text=True, timeout=HANGS_S)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"
    document = json.loads((tmp_path / "sim.json").read_text())
    assert document["otherData"]["simulated"] is True
    for event in document["traceEvents"]:
        assert event["ph"] == "M" or (event["dur"] >= 0 and event["ts"] >= 0)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plan(planned("without a GPU"), tmp_path / "plan.yaml")
    result = command("planner", "simulate", "plan=plan.yaml", "trace=sim.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "sim.png").read_bytes().startswith(b"\x89PNG")


def test_rules_warn_is_offered_only_where_it_passes_over_the_rule(tmp_path: Path) -> None:
    write_plan(planned("streams from the SSD"), tmp_path / "plan.yaml")
    line = refusal("planner", "simulate", "plan=plan.yaml", "force.host_head=99", cwd=tmp_path)
    assert "weights.host.head=99; allowed: 0" in line and line.endswith("set head=0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["plan=, demo=", "planner solve"]),
        (["plan=plan.yaml", "demo=small-cache"], ["plan=, demo=", "only one"]),
        (["plan=none.yaml"], ["plan=none.yaml", "no such file"]),
        (["demo=nothing"], ["demo=nothing", "rolling-50-55"]),
        (["plan=plan.yaml", "trace=sim.txt"], ["trace=sim.txt", ".json", ".png"]),
        (["plan=plan.yaml", "trace=/proc/sim.png"], ["trace=/proc/sim.png: /proc is not a directory that can be written to"]),
        (["plan=plan.yaml", "out=/proc/sim.json"], ["out=/proc/sim.json: /proc is not a directory that can be written to"]),
        (["plan=plan.yaml", "rules=perhaps"], ["rules", "refuse", "warn"]),
        (["demo=hwm-at-cap"], ["hwm = cap + k", "hwm_layers=50", "rules=warn"]),
        (["demo=window-over-capacity"], ["cap <= prefetch_distance <= hwm", "rules=warn"]),
        (["plan=plan.yaml", "rules=warn", "force.queue_depth=0"], ["rules=warn cannot pass over", "queue_depth=0"]),
        (["plan=plan.yaml", "rules=warn", "force.hwm_layers=0"], ["weights.dram.hwm_layers=0", "or more"]),
        (["plan=plan.yaml", "rules=warn", "force.vram_slots=1"], ["weights.vram.slots=1"]),
        (["plan=plan.yaml", "routings=routing.jsonl"], ["routings=routing.jsonl", "no routed experts"]),
        (["plan=experts.yaml", "routings=none.jsonl"], ["routings=none.jsonl", "cannot be read"]),
        (["plan=experts.yaml", "routings=other.jsonl"], ["routings=other.jsonl", "2 MoE layers", "8"]),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    write_plan(planned("streams from the SSD"), tmp_path / "plan.yaml")
    if "plan=experts.yaml" in arguments:
        hardware, model, work = small.machine(), small.model(experts=8), small.work()
        made = solve(hardware, model, work, Force())
        write_plan(Plan(hardware, model, work, made, predict(hardware, model, work, made)), tmp_path / "experts.yaml")
        (tmp_path / "other.jsonl").write_text('{"prompt": 0, "experts": [[0, 1], [2, 3]]}\n')
    line = refusal("planner", "simulate", *arguments, cwd=tmp_path)
    assert all(word in line for word in words), line


def test_a_simulation_without_end_is_refused() -> None:
    plan = planned(next(iter(CASES)))
    check_length(plan)
    chunked = replace(plan, decisions=replace(plan.decisions, prefill_chunk_tokens=16))
    for change in ({"requests": 2**31}, {"new_tokens": 2**31}, {"prompt_tokens": 2**31}):
        with pytest.raises(UserError, match=r"passes over the model, and at most 10000000"):
            check_length(replace(chunked, workload=replace(plan.workload, **change)))


def test_a_long_simulation_says_once_how_long_the_rest_takes() -> None:
    said: list[str] = []
    now = iter([0.0, 4.0, 6.0, 7.0, 8.0])
    hint = Hint(said.append, lambda: next(now))
    for done in (10, 20, 30, 40):
        hint(done, 1000)
    assert len(said) == 1 and said[0].startswith("20 of 1000 decode steps are simulated; the rest takes about 294 s")
    hint = Hint(said.append, iter([0.0, 6.0]).__next__)
    hint(900, 1000)
    assert len(said) == 1, "it is nearly over"
