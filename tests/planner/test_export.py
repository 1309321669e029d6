"""`planner export`: what each target is told, what it cannot be told, and what that costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.planner.asked.verb_schema import TargetName
from penstock.planner.common.command.wsm import TABLE, read_environment
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import CachePolicy, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.export.exported import Exported, Request
from penstock.planner.export.otherwise import tables_outside_bytes
from penstock.planner.export.targets import TARGETS, find_target
from penstock.planner.export.wsm_env import keys_of_plan, variables
from penstock.planner.solver.program import solve
from tests.cli import ROOT, command, refusal
from tests.planner.small import GB, MB, machine, model, work

NAMES = [target.name for target in TARGETS]


def plan_of(hardware: Any, spec: Any, workload: Any = None, **force: Any) -> Plan:
    workload = workload or work(vram_guard_bytes=16 * 2**20)
    decisions = solve(hardware, spec, workload, Force(**force))
    return Plan(hardware, spec, workload, decisions, predict(hardware, spec, workload, decisions))


@pytest.fixture(scope="module")
def dense() -> Plan:
    """Streams from DRAM and SSD, with some units in VRAM: 16 layers of 160 MB."""
    return plan_of(machine(GB, 2 * GB), model(16))


@pytest.fixture(scope="module")
def routed() -> Plan:
    """8 layers of 8 experts of 15 MB, some of them in VRAM."""
    return plan_of(machine(700 * MB, 3 * GB), model(8, experts=8))


@pytest.fixture(scope="module")
def on_cpu() -> Plan:
    return plan_of(machine(0, 2 * GB), model(16))


def exported(name: str, plan: Plan) -> Exported:
    return find_target(name).export(Request(plan, "plan.yaml"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["dense", "routed", "on_cpu"])
def test_every_target_writes_every_plan_with_what_it_cannot_be_told(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    made = exported(name, request.getfixturevalue(kind))
    assert made.losses.lost and all(lost.tokens_per_s or lost.unpredicted for lost in made.losses.lost)
    assert (made.losses.together_tokens_per_s is None) == bool(made.losses.cannot_run)
    told = " ".join(made.text.replace("#", "").replace('"', "").replace(",\n", "\n").split())
    assert all(lost.decided in told and lost.instead in told for lost in made.losses.lost)


def test_the_environment_that_is_written_is_read_back_as_the_same_decisions(dense: Plan, routed: Plan, on_cpu: Plan) -> None:
    for plan in (dense, routed, on_cpu):
        lines = exported("env", plan).text.splitlines()
        environ = dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))
        read = dict(override.split("=", 1) for override in read_environment(environ, "solve", set()).overrides)
        assert read == keys_of_plan(plan)


def test_solving_under_the_written_environment_gives_what_it_says(dense: Plan) -> None:
    keys = {key.removeprefix("force."): value for key, value in keys_of_plan(dense).items() if key.startswith("force.")}
    force = Force(**{key: CachePolicy(value) if key == "policy" else int(value) for key, value in keys.items()})
    again = replace(dense, decisions=solve(dense.hardware, dense.model, dense.workload, force))
    assert keys_of_plan(again) == keys_of_plan(dense)


@pytest.mark.parametrize("variable", TABLE, ids=lambda v: v.name)
def test_every_variable_says_what_it_reads(variable: Any) -> None:
    for text in ("0", "1"):
        value = variable.convert(text)
        assert value is not None and variable.convert(variable.form.write(value)) == value


def test_a_distance_that_layers_cannot_say_is_left_to_the_variable_that_counts_units() -> None:
    assert variables({"force.vram_slots": "5"}) == {"WSM_GPU_MAX_GROUPS": "5"}
    assert set(variables({"force.vram_prefetch_distance": "3"}).values()) == {"1"}


def test_what_streaming_every_unit_costs_is_what_the_planner_predicts_of_it(dense: Plan) -> None:
    kept = dense.decisions.weights.vram.resident_units
    assert kept.attn or kept.ffn
    d, w = dense.decisions, dense.decisions.weights
    none = replace(d, weights=replace(w, vram=replace(w.vram, resident_units=replace(kept, attn=0, ffn=0))))
    said = next(lost for lost in exported("env", dense).losses.lost if "stay in VRAM" in lost.decided)
    assert said.tokens_per_s == predict(dense.hardware, dense.model, dense.workload, none).decode_tokens_per_s


def test_nothing_overlapped_over_pageable_memory_is_slower_than_either(dense: Plan, routed: Plan) -> None:
    for plan in (dense, routed):
        made = exported("accelerate", plan)
        alone = [lost.tokens_per_s for lost in made.losses.lost if lost.tokens_per_s is not None]
        assert made.losses.together_tokens_per_s is not None and made.losses.together_tokens_per_s < min(alone)
        assert max(alone) <= plan.prediction.decode_tokens_per_s * 1.0001


def test_the_verb_writes_a_file_and_ends_with_one_json_line(tmp_path: Path) -> None:
    solved = command("planner", "solve", "hardware=rtx5080", "model=llama70b", cwd=tmp_path)
    assert solved.returncode == 0, solved.stderr
    result = command("planner", "export", "plan=plan.yaml", "to=accelerate", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    document, written = json.loads(result.stdout.splitlines()[-1]), tmp_path / "plan.accelerate.json"
    assert document["out"] == written.name and document["lost"][0]["decode_tokens_per_s"] > 0
    assert any(f"{document['together_tokens_per_s']:.3g} tokens/s" in line for line in json.loads(written.read_text())["comment"])


@pytest.mark.parametrize(
    ("arguments_", "words"),
    [
        (("plan=none.yaml", "to=env"), ["none.yaml", "no such file"]),
        (("plan=odd.yaml", "to=env"), ["odd.yaml", "not a plan"]),
        (("plan=odd.yaml", "to=acelerate"), ["to=acelerate", ", ".join(NAMES), "did you mean accelerate?"]),
        (("plan=odd.yaml",), ["to=... is required", ", ".join(NAMES)]),
    ],
)
def test_a_wrong_plan_or_target_is_one_line(arguments_: tuple[str, ...], words: list[str], tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("a: 1\n")
    line = refusal("planner", "export", *arguments_, cwd=tmp_path)
    assert all(word in line for word in words), line


def test_kv_that_spills_is_more_than_an_engine_can_hold_that_keeps_it_beside_the_compute() -> None:
    spec = model(8)
    spilling = work(batch=64, prompt_tokens=2000, kv_spill=True, vram_guard_bytes=16 * 2**20)
    plan = plan_of(machine(3 * GB, 64 * GB), spec, spilling)
    assert plan.decisions.kv.dram_pages
    losses = exported("accelerate", plan).losses
    assert losses.cannot_run and losses.together_tokens_per_s is None


@pytest.mark.parametrize(("head", "embedding"), [(1, Tier.dram), (0, Tier.vram), (0, Tier.dram)])
def test_a_tied_table_lies_where_either_of_its_uses_wants_it(head: int, embedding: Tier) -> None:
    spec = model(16, tied=True)
    made = plan_of(machine(GB, 64 * GB), spec)
    w = made.decisions.weights
    units = replace(w.vram.resident_units, head=head)
    weights = replace(w, head_blocks=1, embedding=embedding, vram=replace(w.vram, resident_units=units))
    plan = replace(made, decisions=replace(made.decisions, weights=weights))
    outside = head == 0 and embedding is Tier.dram
    assert tables_outside_bytes(plan) == (spec.embed_bytes if outside else 0)
    mapped = json.loads(exported("accelerate", plan).text)["device_map"]
    assert mapped["model.embed_tokens"] == mapped["lm_head"] == ("cpu" if outside else 0)


def test_the_configuration_knows_every_target() -> None:
    assert [name.value for name in TargetName] == NAMES


def test_the_page_about_export_tells_of_every_target() -> None:
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    for target in TARGETS:
        assert f"| `{target.name}` | `plan.{target.ending}`" in page
