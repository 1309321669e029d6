"""`planner export`: what each target is told, what it cannot be told, and what that costs."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.planner.asked.verb_schema import TargetName
from penstock.planner.common.command.wsm import TABLE, read_environment
from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import CachePolicy, KvReuse, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.cost import predict
from penstock.planner.contract.prices.memory_law import kept_page_bytes
from penstock.planner.export.exported import Exported, Request
from penstock.planner.export.otherwise import expert_tiers, tables_outside_bytes, weights_outside_bytes
from penstock.planner.export.targets import TARGETS, find_target
from penstock.planner.export.wsm_env import keys_of_plan, variables
from penstock.planner.solver.program import solve
from tests.cli import ROOT, command, refusal
from tests.planner.small import GB, MB, machine, model, work

NAMES = [target.name for target in TARGETS]
GPU_ONLY = ("lightllm", "vllm", "deepspeed")
DOCUMENTED = {
    "lightllm": """--model_dir --tp --max_total_token_num --max_req_total_len --running_max_req_size --chunked_prefill_size
        --batch_max_tokens --enable_cpu_cache --cpu_cache_storage_size --cpu_cache_token_page_size --enable_disk_cache
        --disk_cache_storage_size --disk_cache_dir""",
    "llama.cpp": "-m -ngl -fit -ot -c -np -b -ub -ctk -ctv -nkvo -cram --slot-save-path",
    "vllm": """--offload-backend --cpu-offload-gb --cpu-offload-params --max-model-len --max-num-seqs --max-num-batched-tokens --block-size
        --kv-cache-memory-bytes --kv-offloading-size --kv-offloading-backend""",
}
"""Flags as the pages that each module of planner/export cites have them, read in November 2026."""


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


def exported(name: str, plan: Plan, checkpoint: str | None = "weights", directory: str | None = "kv dir") -> Exported:
    return find_target(name).export(Request(plan, "plan.yaml", checkpoint, directory))


def arguments(made: Exported, tmp_path: Path) -> list[str]:
    """What a script gives its engine, by running it with an engine that prints its arguments."""
    script = tmp_path / "script.sh"
    script.write_text(made.text)
    for engine in ("python", "llama-server", "vllm"):
        fake = tmp_path / engine
        fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    result = subprocess.run(["bash", str(script), "--more"], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def after(flag: str, given: list[str]) -> list[str]:
    return [value for name, value in zip(given, given[1:], strict=False) if name == flag]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["dense", "routed", "on_cpu"])
def test_every_target_writes_every_plan_or_says_in_one_line_why_not(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    plan = request.getfixturevalue(kind)
    if kind == "on_cpu" and name in GPU_ONLY:
        with pytest.raises(UserError, match=f"^to={name}: .*GPU.*solve with a GPU"):
            exported(name, plan)
        return
    made = exported(name, plan)
    assert made.losses.lost and all(lost.tokens_per_s or lost.unpredicted for lost in made.losses.lost)
    assert (made.losses.together_tokens_per_s is None) == bool(made.losses.cannot_run)
    told = " ".join(made.text.replace("#", "").replace('"', "").replace(",\n", "\n").split())
    assert all(lost.decided in told and lost.instead in told for lost in made.losses.lost)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_script_is_bash_that_gives_documented_flags_only(name: str, dense: Plan, routed: Plan, tmp_path: Path) -> None:
    pages = replace(dense.decisions.kv, reuse=KvReuse(1, 2, GB))
    keeps = replace(dense, decisions=replace(dense.decisions, kv=pages))
    for plan in (keeps, routed):
        given = arguments(exported(name, plan), tmp_path)
        flags = {word for word in given if re.fullmatch(r"--?[a-z].*", word)} - {"--more", "-m" if name == "lightllm" else ""}
        assert flags <= set(DOCUMENTED[name].split()), flags - set(DOCUMENTED[name].split())
        assert given[-1] == "--more" and "weights" in given


def test_a_script_without_a_checkpoint_asks_for_it_by_name(dense: Plan, tmp_path: Path) -> None:
    for name, variable in (("lightllm", "MODEL"), ("llama.cpp", "GGUF"), ("vllm", "MODEL")):
        script = tmp_path / f"{name}.sh"
        script.write_text(exported(name, dense, checkpoint=None).text)
        result = subprocess.run(["bash", str(script)], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
        assert result.returncode != 0 and f"set {variable} to" in result.stderr


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
        assert max(alone) <= plan.predicted.decode_tokens_per_s * 1.0001


@pytest.mark.parametrize("kind", ["dense", "routed"])
def test_llama_cpp_gets_as_many_units_in_vram_as_planned(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    plan = request.getfixturevalue(kind)
    given = arguments(exported("llama.cpp", plan), tmp_path)
    layers = plan.model.layers
    first = layers + 1 - int(after("-ngl", given)[0])
    patterns = [value.removesuffix("=CPU") for value in after("-ot", given)]
    assert all(value.endswith("=CPU") for value in after("-ot", given))

    def in_vram(tensor: str) -> list[int]:
        names = {i: f"blk.{i}.{tensor}.weight" for i in range(first, layers)}
        return [i for i, name in names.items() if not any(re.search(pattern, name) for pattern in patterns)]

    kept = plan.decisions.weights.vram.resident_units
    assert (len(in_vram("attn_q")), len(in_vram("ffn_gate_inp"))) == (kept.attn, kept.ffn)
    tiers = expert_tiers(plan)
    if tiers:
        assert len(in_vram("ffn_up_exps")) == sum(tier == "vram" for tier in tiers.values())
    whole_head = plan.decisions.weights.vram.resident_units.head == plan.decisions.weights.head_blocks
    assert any(re.search(pattern, "output.weight") for pattern in patterns) != whole_head


def test_vllm_offloads_what_lies_outside_vram_and_says_when_dram_is_too_small(dense: Plan, tmp_path: Path) -> None:
    made = exported("vllm", dense)
    outside = weights_outside_bytes(dense)
    offloaded = float(after("--cpu-offload-gb", arguments(made, tmp_path))[0]) * 2**30
    assert outside <= offloaded < outside + 2**30 / 50
    assert outside > dense.hardware.dram_bytes and "more than the plan may use" in made.losses.cannot_run
    roomy = plan_of(machine(GB, 64 * GB), model(16))
    assert exported("vllm", roomy).losses.cannot_run == ""


def test_lightllm_gets_the_plans_pages_in_every_tier(tmp_path: Path) -> None:
    plan = plan_of(machine(16 * GB), model(8), work(prompt_tokens=4096, shared_prefix_tokens=4000, kept_tokens=400_000))
    kept = replace(plan.decisions.kv, reuse=replace(plan.decisions.kv.reuse, dram_pages=333))
    plan = replace(plan, decisions=replace(plan.decisions, kv=kept))
    reuse, tokens = plan.decisions.kv.reuse, plan.decisions.kv.page_tokens
    page = kept_page_bytes(plan.model, tokens)
    assert reuse.dram_pages and reuse.ssd_bytes
    made = exported("lightllm", plan)
    given = arguments(made, tmp_path)
    running = plan.decisions.kv.vram_pages // plan.model.layers * tokens
    assert after("--max_total_token_num", given) == [str(running + reuse.vram_pages * tokens)]
    assert int(float(after("--cpu_cache_storage_size", given)[0]) * 2**30 / page + 1e-6) == reuse.dram_pages
    assert round(float(after("--disk_cache_storage_size", given)[0]) * 2**30) == reuse.ssd_bytes
    assert after("--disk_cache_dir", given) == ["kv dir"]
    assert made.losses.cannot_run == "" and made.losses.together_tokens_per_s == pytest.approx(plan.predicted.decode_tokens_per_s, rel=0.02)


def test_deepspeed_keeps_as_much_in_vram_and_names_one_device_for_the_rest(dense: Plan) -> None:
    document = json.loads(exported("deepspeed", dense).text)
    zero = document["zero_optimization"]
    kept = (dense.model.weight_bytes - weights_outside_bytes(dense)) // dense.model.dtype_bytes
    assert zero["stage"] == 3 and zero["stage3_model_persistence_threshold"] == kept
    assert zero["offload_param"]["device"] == "nvme" and zero["offload_param"]["nvme_path"] == "kv dir"
    assert set(document) == {"comment", "train_micro_batch_size_per_gpu", "zero_optimization", "bf16", "aio"}
    roomy = json.loads(exported("deepspeed", plan_of(machine(GB, 64 * GB), model(16))).text)
    assert roomy["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True} and "aio" not in roomy


def test_the_verb_writes_a_file_and_ends_with_one_json_line(tmp_path: Path) -> None:
    solved = command("planner", "solve", "hardware=rtx5080", "model=llama70b", cwd=tmp_path)
    assert solved.returncode == 0, solved.stderr
    result = command("planner", "export", "plan=plan.yaml", "to=llama.cpp", "checkpoint=a model.gguf", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    script = tmp_path / "plan.llama.cpp.sh"
    assert document["out"] == script.name and document["lost"][0]["decode_tokens_per_s"] > 0
    assert script.stat().st_mode & stat.S_IXUSR and shlex.quote("a model.gguf") in script.read_text()
    assert f"{document['together_tokens_per_s']:.3g} tokens/s" in script.read_text()


@pytest.mark.parametrize(
    ("arguments_", "words"),
    [
        (("plan=none.yaml", "to=env"), ["none.yaml", "no such file"]),
        (("plan=odd.yaml", "to=env"), ["odd.yaml", "not a plan"]),
        (("plan=odd.yaml", "to=llamacpp"), ["to=llamacpp", ", ".join(NAMES), "did you mean llama.cpp?"]),
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
    for name in ("lightllm", "accelerate", "vllm", "deepspeed"):
        losses = exported(name, plan).losses
        assert losses.cannot_run and losses.together_tokens_per_s is None
    assert "-nkvo" in exported("llama.cpp", plan).text


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
