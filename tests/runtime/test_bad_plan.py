"""A plan that breaks a rule, or that this machine cannot keep, is refused by the name of what is wrong."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.config.config_schema import ForceConfig
from penstock.planner.contract.decided.decisions import ExpertSlots
from penstock.planner.contract.rules.setting import NO_GPU
from penstock.runtime.asked.run_schema import ReuseConfig, Validation
from penstock.runtime.memory import free_memory as memory
from tests.cli import ROOT
from tests.runtime.running import Desk, desk
from tests.support import decisions, plan_for, save_tiny

BREAK: list[tuple[dict[str, Any], str]] = [
    ({"weights.dram.prefetch_distance": 5}, "cap <= prefetch_distance <= hwm"),
    ({"weights.dram.hwm_layers": 3}, "hwm = cap + k, 3 <= k <= 10"),
    (
        dict.fromkeys(("weights.dram.cap_layers", "weights.dram.resident_layers", "weights.dram.prefetch_distance"), 7)
        | {"weights.dram.hwm_layers": 10},
        "cap <= layers through DRAM",
    ),
    ({"weights.dram.cap_layers": -1}, "weights.dram.cap_layers range"),
    ({"weights.dram.resident_layers": 3}, "resident_layers = cap under pinned, 0 under rolling"),
    ({"weights.vram.slots": 1}, "no VRAM ring without a GPU"),
    ({"weights.vram.resident_units.attn": 1}, "weights.vram.resident_units.attn range"),
    ({"weights.vram.resident_units.ffn": 1}, "weights.vram.resident_units.ffn range"),
    ({"weights.vram.resident_units.head": 1}, "weights.vram.resident_units.head range"),
    ({"weights.embedding": "vram"}, "embedding tier"),
    ({"weights.head_blocks": 2}, "weights.head_blocks range"),
    ({"weights.ssd.block_bytes": 4097}, "block multiple of 4096"),
    ({"weights.ssd.queue_depth": 0}, "weights.ssd.queue_depth range"),
    ({"weights.ssd.staging_bytes": 4096}, "staging >= block x queue depth"),
    ({"weights.h2d.chunk_bytes": 0}, "weights.h2d.chunk_bytes range"),
    ({"weights.h2d.in_flight": 0}, "weights.h2d.in_flight range"),
    ({"weights.host": {"ffn": 1, "rows": 1}}, "units that the CPU computes"),
    ({"kv.page_tokens": 48}, "KV page size"),
    ({"kv.dram_pages": 1}, "KV pages for the workload"),
    ({"kv.dram_pages": -1}, "kv.dram_pages range"),
    ({"kv.vram_pages": 1}, "KV tier"),
    ({"kv.ssd_pages": 1}, "KV page size on SSD"),
    ({"kv.dram_pages": 385}, "KV layer by layer"),
    ({"kv.reuse": {"vram_pages": 1}}, "kv.reuse.vram_pages range"),
    ({"kv.reuse": {"ssd_bytes": 1 << 30}}, "kept KV page size on SSD"),
    ({"kv.reuse": {"ssd_bytes": 4096}, "kv.page_tokens": 64}, "kept KV bytes on SSD"),
    (
        {"workload.kv_spill": True, "kv.page_tokens": 64, "kv.dram_pages": 6, "kv.ssd_pages": 6, "kv.reuse": {"dram_pages": 1}},
        "no kept KV beside KV on the SSD",
    ),
    ({"batch": 0}, "batch range"),
    ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens range"),
    ({"recorded_prompt_tokens": 16}, "prompts that are recorded"),
    ({"experts": {"vram_slots": 0, "dram_slots": 8}}, "experts section"),
    ({"hardware.dram_bytes": 1 << 20}, "DRAM capacity"),
    ({"kv.reuse": {"ssd_bytes": 1 << 30}, "kv.page_tokens": 64, "hardware.ssd_bytes": 1 << 10}, "SSD capacity"),
]
"""Edits, by dotted place in the plan's file, and the first rule that they break."""
BREAK_GPU: list[tuple[dict[str, Any], str]] = [
    ({"weights.vram.slots": 3}, "vram_slots >= vram_prefetch_distance + 2"),
    ({"weights.vram.prefetch_distance": -1}, "weights.vram.prefetch_distance range"),
    ({"weights.head_blocks": 1, "model.units.4.stored_bytes": 1 << 20}, "head block <= FFN unit"),
    ({"hardware.vram_bytes": 1 << 20}, "VRAM capacity"),
]
"""The same of a plan with a GPU."""
BREAK_MOE: list[tuple[dict[str, Any], str]] = [
    ({"experts.dram_slots": 2}, "expert slots"),
    ({"experts.prefetch": 3}, "experts.prefetch range"),
    ({"experts.read_ahead": 1}, "experts.read_ahead range"),
    ({"experts.in_flight": 0}, "experts.in_flight range"),
    ({"experts.chunk_bytes": 100}, "experts.chunk_bytes range"),
]
BREAK_STATE: list[tuple[dict[str, Any], str]] = [({"kv.reuse": {"vram_pages": 0, "dram_pages": 3, "ssd_bytes": 0}}, "KV that stays")]
"""The same of a model whose convolutions keep a state."""


def set_in(plan: dict[str, Any], place: str, value: Any) -> None:
    *path, name = place.split(".")
    for key in path:
        plan = plan[int(key) if key.isdigit() else key]
    plan[name] = value


def assert_refused_by_rule(here: Desk, edits: dict[str, Any], rule: str) -> None:
    plan = yaml.safe_load(here.plan.read_text())
    for place, value in edits.items():
        set_in(plan, place, value)
    here.plan.write_text(yaml.safe_dump(plan))
    line = here.refusal()
    assert f"breaks a rule ({rule})" in line and "allowed" in line


@pytest.mark.parametrize(("edits", "rule"), BREAK, ids=[rule for _, rule in BREAK])
def test_a_plan_edited_to_break_a_rule_is_refused_by_its_name(here: Desk, edits: dict[str, Any], rule: str) -> None:
    assert_refused_by_rule(here, edits, rule)


@pytest.mark.parametrize(("edits", "rule"), BREAK_GPU, ids=[rule for _, rule in BREAK_GPU])
def test_a_gpu_plan_edited_to_break_a_rule_is_refused_by_its_name(
    checkpoint: Path, tmp_path: Path, edits: dict[str, Any], rule: str
) -> None:
    assert_refused_by_rule(desk(tmp_path, plan_for(checkpoint, decisions(gpu=True, head_blocks=2), gpu=True)), edits, rule)


@pytest.mark.parametrize(("edits", "rule"), BREAK_MOE, ids=[rule for _, rule in BREAK_MOE])
def test_a_moe_plan_edited_to_break_a_rule_is_refused_by_its_name(tmp_path: Path, edits: dict[str, Any], rule: str) -> None:
    made = replace(decisions(), experts=ExpertSlots(0, 16))
    here = desk(tmp_path, plan_for(save_tiny(tmp_path / "moe", "mixtral"), made))
    assert_refused_by_rule(here, edits, rule)


@pytest.mark.parametrize(("edits", "rule"), BREAK_STATE, ids=[rule for _, rule in BREAK_STATE])
def test_a_plan_of_a_model_with_states_edited_to_break_a_rule_is_refused_by_its_name(
    tmp_path: Path, edits: dict[str, Any], rule: str
) -> None:
    mixed = save_tiny(tmp_path / "mixed", "lfm2", layer_types=["conv", "full_attention"] * 3, block_auto_adjust_ff_dim=False)
    assert_refused_by_rule(desk(tmp_path, plan_for(mixed, decisions())), edits, rule)


def test_no_rule_was_forgotten_above() -> None:
    """Every rule's name in the source is broken by one of the edits; tests/planner/test_declared.py breaks every decision's bounds."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "planner" / "contract" / "rules").glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    named = [c.args[0] for c in calls if c.func.id == "BrokenRule"]
    given = {k.value.value for c in calls for k in c.keywords if k.arg == "rule" and isinstance(k.value, ast.Constant)}
    constants = {n.value.value for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)} - {NO_GPU}
    literal = {n.value for n in named if isinstance(n, ast.Constant)} | given | constants
    assert len(literal) > 15 and literal <= {rule for _, rule in (*BREAK, *BREAK_GPU, *BREAK_MOE, *BREAK_STATE)}


def test_a_plan_that_is_no_plan_is_refused(here: Desk) -> None:
    assert "planner solve" in here.refusal(plan=str(here.plan.with_name("missing.yaml")))
    assert str(here.plan.parent) in here.refusal(plan=str(here.plan.parent))
    here.plan.write_bytes(b"\x80\x81")
    assert str(here.plan) in here.refusal()


@pytest.mark.parametrize("row", range(4), ids=["attn", "ffn", "norm", "embed"])
@pytest.mark.parametrize("nbytes", [4096, 8 << 30])
def test_a_plan_whose_sizes_are_not_the_checkpoints_is_refused_before_memory_is_taken(here: Desk, row: int, nbytes: int) -> None:
    """Its digest may be right all the same."""
    plan = yaml.safe_load(here.plan.read_text())
    plan["model"]["units"][row]["stored_bytes"], plan["hardware"]["dram_bytes"] = nbytes, 1 << 40
    here.plan.write_text(yaml.safe_dump(plan))
    assert f"{('attn', 'ffn', 'norm', 'embed')[row]}_bytes is" in here.refusal()


def test_a_forced_decision_that_breaks_a_rule_is_refused(here: Desk) -> None:
    assert "hwm = cap + k" in here.refusal(force=ForceConfig(hwm_layers=20))


def test_kv_on_the_ssd_needs_a_place_there_and_excludes_reuse(here: Desk, tmp_path: Path) -> None:
    plan = yaml.safe_load(here.plan.read_text())
    plan["workload"]["kv_spill"], plan["kv"] = True, {"page_tokens": 64, "vram_pages": 0, "dram_pages": 6, "ssd_pages": 6}
    here.plan.write_text(yaml.safe_dump(plan))
    assert "name another one" in here.refusal(kv=ReuseConfig(scratch_dir=str(tmp_path / "missing")))
    assert "leave kv.dir out" in here.refusal(kv=ReuseConfig(dir=str(tmp_path / "pages")))
    assert here.run(max_new_tokens=4, validate=Validation.full)["logits"]["identical"]


def test_a_plan_for_a_gpu_is_refused_where_there_is_none(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "hardware=cpu" in desk(tmp_path, plan_for(checkpoint, decisions(gpu=True, head_blocks=2), gpu=True)).refusal()


def test_a_plan_for_more_memory_than_is_free_is_refused(here: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    real = memory.memory_facts()
    monkeypatch.setattr(memory, "memory_facts", lambda: replace(real, mem_available=real.margin_bytes + 1_000_000, virtual=False))
    line = here.refusal()
    assert "of DRAM and 1 MB is free" in line and "hardware.dram_bytes=1000000" in line


@pytest.mark.parametrize(("free", "where"), [(memory.Free(10**6), "DRAM"), (memory.Free(10**12, 10**6, 10**9), "VRAM")])
def test_a_model_that_does_not_fit_whole_is_not_compared(checkpoint: Path, free: memory.Free, where: str) -> None:
    found = spec_from_checkpoint(checkpoint)
    model = replace(found, units=tuple(replace(u, stored_bytes=10**7) if u.kind == "embed" else u for u in found.units))
    with pytest.raises(UserError, match=rf"validate=full: the whole model takes 1\d\.\d MB of {where} and 1 MB is free; set validate=none"):
        memory.refuse_to_compare(model, free)


def test_a_comparison_that_cannot_be_is_refused_before_the_run(here: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UserError("too large")

    monkeypatch.setattr("penstock.runtime.engine.run_job.refuse_to_compare", refuse)
    monkeypatch.setattr("penstock.runtime.engine.open_session.Engine", lambda *_: pytest.fail("the run began"))
    assert here.refusal(validate=Validation.full) == "too large"
