"""Prompts recorded around attention: where the plan has them so, what that gives, and that simulator and program say the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from penstock import solve
from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_seconds
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.plan.schedules import launching_prompts
from penstock.planner.contract.prices.launches import OPERATIONS, begun_issue_s, issue_s, prompt_operations, recorded_operations
from penstock.planner.contract.prices.memory_law import vram_use
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.explain.constraints import prompt_waits_s
from penstock.planner.explain.explanation import _launched
from penstock.planner.explain.purchases import with_card
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.ranks.ranks_act import RanksSimulation

PIECE_S, SHORT = 2e-4, 256
FORCED = "force.recorded_prompt_tokens"


@cache
def plan(piece_s: float = PIECE_S, prompt: int = SHORT, **more: object) -> Plan:
    """8B on an H100, whose host launches a layer in 0.56 ms."""
    given = {"workload.prompt_tokens": prompt, "workload.new_tokens": 8, "hardware.gpu.prompt_piece_s": piece_s}
    return solve(hardware="h100", model="llama8b", **given, **{name.replace("__", "."): value for name, value in more.items()})


def rows_of(made: Plan) -> list[str]:
    return [rule.message for rule in broken_rules(made.hardware, made.model, made.workload, made.decisions)]


def test_a_prompt_whose_launches_bind_is_recorded() -> None:
    launched, recorded = plan(0.0), plan()
    assert launched.decisions.recorded_prompt_tokens == 0 and recorded.decisions.recorded_prompt_tokens == SHORT
    assert recorded.prediction.prefill_s < 0.65 * launched.prediction.prefill_s
    assert recorded.prediction.decode_s_per_token == launched.prediction.decode_s_per_token
    assert launching_prompts(recorded).prediction.prefill_s == pytest.approx(launched.prediction.prefill_s)
    taken, before = (vram_use(one.hardware, one.model, one.workload, one.decisions) for one in (recorded, launched))
    assert taken.pop("prompts") > SHORT * recorded.model.ffn_width * 2 and taken == before


def test_a_long_prompt_is_launched_since_computing_binds() -> None:
    assert plan(prompt=4096).decisions.recorded_prompt_tokens == 0


def test_what_streams_is_launched_and_so_is_a_server() -> None:
    streams = plan(hardware__vram_bytes=8 * 2**30)
    assert streams.placement.streamed_units and streams.decisions.recorded_prompt_tokens == 0
    alike = plan(0.0, hardware__vram_bytes=8 * 2**30)
    assert (streams.prediction.prefill_s, streams.decisions) == (alike.prediction.prefill_s, alike.decisions)
    assert plan(workload__clients=4).decisions.recorded_prompt_tokens == 0


@pytest.mark.parametrize("tokens", [SHORT, 2 * SHORT - 1, 2 * SHORT])
def test_a_layer_that_was_recorded_for_it_takes_the_host_what_is_known_of_one(tokens: int) -> None:
    """Of twice as many tokens it serves none."""
    hardware, model = plan().hardware, plan().model
    more = recorded_operations(hardware, model, SHORT, tokens)
    if tokens == 2 * SHORT:
        assert more == 0
        return
    seconds = issue_s(hardware, model, SHORT, more + prompt_operations(hardware, True))
    assert seconds == pytest.approx(model.layers * PIECE_S)
    part_s = issue_s(hardware, model, SHORT, more + prompt_operations(hardware, True) + OPERATIONS.part) - seconds
    assert part_s == pytest.approx(model.layers * OPERATIONS.part / OPERATIONS.dense(True) * hardware.layer_launch_s)


def test_parts_that_go_from_card_to_card_are_smaller_where_they_are_recorded() -> None:
    """As a host of four H100s that launches a layer in 1.35 ms."""
    asked = {"workload.prompt_tokens": 2048, "workload.new_tokens": 8, "hardware.layer_launch_s": 1.35e-3}
    launched, recorded = (
        solve(hardware="h100x4", model="llama8b", ranks=4, **asked, **{"hardware.gpu.prompt_piece_s": piece_s}) for piece_s in (0.0, 2e-4)
    )
    assert launched.decisions.prefill_part_tokens == 1024
    part = recorded.decisions.prefill_part_tokens
    assert part == recorded.decisions.recorded_prompt_tokens <= 512
    assert [one.decisions.recorded_prompt_tokens for one in recorded.each_rank] == [part] * 4
    assert recorded.prediction.prefill_s < 0.7 * launched.prediction.prefill_s


def test_a_prompt_whose_launches_would_leave_the_host_little_time_is_recorded() -> None:
    """Where computing binds either way. A host may be half as fast as it was when it was probed."""
    asked = {"workload.prompt_tokens": 2048, "workload.new_tokens": 8, "hardware.gpu.prompt_piece_s": 1.3e-4}
    found = {
        launch_s: solve(hardware="h100x2", model="llama8b", ranks=2, **asked, **{"hardware.layer_launch_s": launch_s})
        for launch_s in (2e-4, 7e-4)
    }
    assert [made.decisions.prefill_part_tokens for made in found.values()] == [1024, 1024]
    assert [made.decisions.recorded_prompt_tokens for made in found.values()] == [0, 1024]
    forced = solve(hardware="h100x2", model="llama8b", ranks=2, **asked, **{"hardware.layer_launch_s": 7e-4, FORCED: 0})
    assert forced.prediction.prefill_s == pytest.approx(found[7e-4].prediction.prefill_s, rel=0.005)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_simulator_says_what_is_promised(ranks: int) -> None:
    made = plan()
    if ranks > 1:
        asked = {"workload.prompt_tokens": 1024, "workload.new_tokens": 8, "hardware.layer_launch_s": 1.35e-3}
        made = solve(hardware="h100x4", model="llama8b", ranks=ranks, **asked, **{"hardware.gpu.prompt_piece_s": 2e-4})
    assert made.decisions.recorded_prompt_tokens
    acted = Simulation(made, Options()).run() if ranks == 1 else RanksSimulation(made, Options()).run()[0]
    assert fmean(acted.record.prefill_ns) / 1e9 == pytest.approx(made.prediction.prefill_s, rel=0.03)


def test_a_plan_file_holds_it(tmp_path: Path) -> None:
    write_plan(plan(), tmp_path / "plan.yaml")
    assert f"recorded_prompt_tokens: {SHORT}" in (tmp_path / "plan.yaml").read_text()
    assert read_plan(tmp_path / "plan.yaml").decisions == plan().decisions
    write_plan(plan(0.0), tmp_path / "launched.yaml")
    assert "recorded_prompt_tokens" not in (tmp_path / "launched.yaml").read_text()


def test_it_may_be_forced_either_way() -> None:
    assert plan(**{FORCED.replace(".", "__"): 0}).decisions.recorded_prompt_tokens == 0
    assert plan(prompt=4096, **{FORCED.replace(".", "__"): 4096}).decisions.recorded_prompt_tokens == 4096
    with pytest.raises(UserError, match=f"{FORCED}=256 breaks .*allowed: 0, since hardware.gpu.prompt_piece_s is not measured"):
        plan(0.0, **{FORCED.replace(".", "__"): SHORT})
    with pytest.raises(UserError, match=f"{FORCED}=256 breaks .*allowed: 0, since a server's passes are launched"):
        plan(workload__clients=4, **{FORCED.replace(".", "__"): SHORT})
    with pytest.raises(UserError, match=f"{FORCED}=255 breaks .*allowed: 256 or more or 0, the tokens of a pass"):
        plan(**{FORCED.replace(".", "__"): SHORT - 1})


@pytest.mark.parametrize(
    "residents, why", [({"attn": 31}, "a unit streams"), ({"ffn": 30}, "2 units stream"), ({"head": 0}, "3 units stream")]
)
def test_an_edited_plan_that_streams_records_no_prompts(residents: dict[str, int], why: str) -> None:
    weights = plan().decisions.weights
    units = replace(weights.vram.resident_units, **residents)
    edited = replace(plan().decisions, weights=replace(weights, vram=replace(weights.vram, resident_units=units)))
    (said,) = rows_of(replace(plan(), decisions=edited))
    assert said == f"recorded_prompt_tokens={SHORT}; allowed: 0, since {why}; set recorded_prompt_tokens=0"


@pytest.mark.parametrize(
    "piece_s, prompt, how",
    [
        (0.0, SHORT, "layers are not recorded for prompts, hardware.gpu.prompt_piece_s is not measured"),
        (4e-4, SHORT, "also where its layers are recorded around their attention"),
        (0.0, 4096, None),
        (1e-5, SHORT, "also where its layers are recorded around their attention"),
    ],
)
def test_a_user_is_told_what_a_prompt_waits_for(piece_s: float, prompt: int, how: str | None) -> None:
    made = plan(piece_s, prompt)
    said = list(_launched(made))
    if how is None:
        assert said == [] and prompt_waits_s(made) == 0
        return
    (line,) = said
    waited = f"{show_seconds(prompt_waits_s(made))} of {show_seconds(made.prediction.prefill_s)}"
    by = "gpu.prompt_piece_s" if piece_s else "layer_launch_s"
    assert line == f"A prefill waits {waited} for the host to launch (hardware.{by}): {how}."
    least_s = plan(1e-5).prediction.prefill_s - begun_issue_s(made.hardware)
    assert prompt_waits_s(made) == pytest.approx(made.prediction.prefill_s - least_s, rel=0.02)


def test_another_card_has_the_host_that_launches_for_this_one() -> None:
    hardware, other = plan().hardware, solve(hardware="h200", model="llama8b").hardware
    assert other.gpu is not None and other.gpu.prompt_piece_s not in (0, PIECE_S)
    found = with_card(hardware, other).gpu
    assert found is not None and found.prompt_piece_s == PIECE_S and found.name == other.gpu.name
