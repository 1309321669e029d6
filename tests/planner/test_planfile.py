"""A plan survives its file; a file that is no plan is refused by the key that is wrong."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.config.config_schema import ModelConfig
from penstock.planner.contract.config.geometry import spec_from_geometry
from penstock.planner.contract.decided.decisions import KvReuse
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import check_plan, read_plan, write_plan
from penstock.planner.solver.program import solve
from tests.support import machine, workload

LLAMA = ModelConfig(name="small", model_type="llama", layers=6, hidden=256, ffn=512, heads=4, kv_heads=2, head_dim=64, vocab=1000)
MIXTRAL = ModelConfig(
    name="moe", model_type="mixtral", layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, vocab=1000, experts=4, top_k=2, expert_ffn=512
)


def uneven(model: ModelSpec) -> ModelSpec:
    """The same with a larger last FFN and what a checkpoint adds."""
    last = replace(model.of_kind(UnitKind.ffn)[-1], stored_bytes=model.ffn_max + 4096)
    units = tuple(last if (unit.kind, unit.layer) == (last.kind, last.layer) else unit for unit in model.units)
    return replace(model, units=units, checkpoint="a dir/with = and 'quotes'", digest="abc")


def plan_of(model: ModelSpec, gpu: bool = False, **work: object) -> Plan:
    hardware, work_ = replace(machine(gpu), origin={"ssd.read": "measured: here, with: colons"}), workload(**work)
    made = solve(hardware, model, work_, Force())
    return Plan(hardware, model, work_, made, predict(hardware, model, work_, made), ("a note: with 'quotes'",))


@pytest.fixture
def plan() -> Plan:
    return plan_of(spec_from_geometry(LLAMA))


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("model", [spec_from_geometry(LLAMA), uneven(spec_from_geometry(LLAMA)), spec_from_geometry(MIXTRAL)])
def test_what_is_written_is_read_back_equal(model: ModelSpec, gpu: bool, tmp_path: Path) -> None:
    plan = plan_of(model, gpu, batch=2)
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan


def test_a_plan_for_a_checkpoint_on_a_full_disk_is_still_one_when_it_is_read_and_none_without_the_checkpoint(tmp_path: Path) -> None:
    model = replace(spec_from_geometry(LLAMA), checkpoint="/data/small")
    plan = plan_of(model)
    plan = replace(plan, hardware=replace(plan.hardware, ssd_bytes=0))
    path = tmp_path / "plan.yaml"
    write_plan(plan, path)
    check_plan(read_plan(path))
    assert read_plan(path) == plan
    path.write_text(path.read_text().replace("checkpoint: /data/small", "checkpoint: null"))
    with pytest.raises(UserError, match="SSD capacity"):
        check_plan(read_plan(path))


KEEPING = {"prompt_tokens": 20000, "shared_prefix_tokens": 16384, "kept_tokens": 65536}


@pytest.mark.parametrize("gpu", [False, True])
def test_what_is_kept_and_from_when_it_pays_is_in_the_file(gpu: bool, tmp_path: Path) -> None:
    plan = plan_of(spec_from_geometry(LLAMA), gpu, **KEEPING)
    write_plan(plan, tmp_path / "plan.yaml")
    data, read = yaml.safe_load((tmp_path / "plan.yaml").read_text()), read_plan(tmp_path / "plan.yaml")
    assert read == plan and read.prediction.restored_tokens == 16384
    assert data["kv"]["reuse"] == asdict(plan.decisions.kv.reuse) != asdict(KvReuse())
    assert data["break_even_tokens"] == asdict(plan.break_even) != dict.fromkeys(("vram", "dram", "ssd"))
    assert data["workload"]["kept_tokens"] == 65536


def test_a_plan_of_before_there_was_reuse_keeps_nothing(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.yaml")
    data = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert "reuse" not in data["kv"] and "break_even_tokens" not in data
    for section, key in (("workload", "kept_tokens"), ("predicted", "restore_s"), ("predicted", "restored_tokens")):
        del data[section][key]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(data))
    assert read_plan(tmp_path / "plan.yaml") == plan and plan.decisions.kv.reuse == KvReuse()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("dram_pages: {n}, ssd_bytes", "dram_page: {n}, ssd_bytes", "kv.reuse.dram_page: no such key.*did you mean dram_pages"),
        ("dram_pages: {n}, ssd_bytes", "dram_pages: -4, ssd_bytes", "kv.reuse.dram_pages=-4; allowed: 0 or more"),
        ("dram_pages: {n}, ssd_bytes", "dram_pages: 4000000, ssd_bytes", "DRAM: the plan needs .*kv_reuse"),
        ("dram_pages: {n}, ssd_bytes: ", "dram_pages: {n}, ssd_bytes: x", "kv.reuse.ssd_bytes=x.*whole number"),
        ("reuse: {vram_pages: 0", "reuse: {vram_pages: 7", "kv.reuse.vram_pages=7; allowed: 0 without a GPU"),
        ("kept_tokens: 65536", "kept_tokens: -1", "workload.kept_tokens=-1: must be 0 or more"),
        ("break_even_tokens: {vram: null", "break_even_tokens: {vram: soon", "break_even_tokens.vram=soon.*whole number"),
    ],
)
def test_an_edit_of_what_is_kept_that_cannot_be_is_refused(old: str, new: str, complaint: str, tmp_path: Path) -> None:
    plan = plan_of(spec_from_geometry(LLAMA), **KEEPING)
    old, new = (text.replace("{n}", str(plan.decisions.kv.reuse.dram_pages)) for text in (old, new))
    path = edited(plan, tmp_path / "plan.yaml", old, new)
    with pytest.raises(UserError, match=complaint) as refused:
        check_plan(read_plan(path))
    assert "\n" not in str(refused.value)


def test_an_edit_of_what_is_kept_is_predicted_anew(tmp_path: Path) -> None:
    plan = plan_of(spec_from_geometry(LLAMA), **KEEPING)
    none = read_plan(edited(plan, tmp_path / "plan.yaml", "reuse: {", "reuse: {} # {"))
    assert none.prediction.restored_tokens == 0 and none.prediction.prefill_s > plan.prediction.prefill_s


def test_the_file_has_the_promised_shape(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.yaml")
    data = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert data["penstock"] == 2
    assert set(data["weights"]) >= {"policy", "vram", "dram", "ssd", "h2d"}
    assert set(data["weights"]["vram"]) == {"resident_units", "slots", "prefetch_distance", "ffn_slots"}
    assert set(data["weights"]["dram"]) == {"cap_layers", "hwm_layers", "prefetch_distance", "resident_layers"}
    assert set(data["weights"]["ssd"]) == {"block_bytes", "queue_depth", "staging_bytes"}
    assert set(data["weights"]["h2d"]) == {"chunk_bytes", "in_flight"}
    assert set(data["kv"]) == {"page_tokens", "vram_pages", "dram_pages", "ssd_pages", "host_layers"}
    assert set(data["predicted"]) >= {
        "ttft_s",
        "prefill_s",
        "decode_s_per_token",
        "decode_tokens_per_s",
        "bottleneck_prefill",
        "bottleneck_decode",
        "ssd_bytes_per_token",
        "h2d_bytes_per_token",
        "vram_bytes",
        "dram_bytes",
        "ssd_bytes",
    }
    rows = {row["kind"]: row for row in data["model"]["units"]}
    assert list(rows) == ["attn", "ffn", "norm", "embed", "head"], "units that are alike in one row"
    attn = plan.model.attn_bytes[0]
    assert rows["attn"] == {"kind": "attn", "layers": "0-5", "stored_bytes": attn, "elements": attn // 2, "format": "BF16"}
    assert (data["model"]["compute_dtype"], data["model"]["kv_dtype"]) == ("bfloat16", "bfloat16")
    assert data["hardware"]["origin"] == plan.hardware.origin


def test_writing_leaves_nothing_but_the_plan_and_makes_its_directory(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "new" / "plan.yaml")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plan.yaml"]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_no_permission_is_refused(plan: Plan, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        write_plan(plan, tmp_path / "plan.yaml")


def edited(plan: Plan, path: Path, old: str, new: str) -> Path:
    write_plan(plan, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("penstock: 2", "penstock: 1", "a plan of format 1, this program reads format 2; solve again"),
        ("penstock: 2", "penstock: 3", "format 3"),
        ("penstock: 2", "penstack: 2", "not a plan"),
        ("policy: pinned", "policy: pined", "weights.policy=pined.*one of pinned, rolling.*did you mean pinned"),
        ("policy: pinned", "polcy: pinned", "weights.polcy: no such key.*did you mean policy"),
        ("cap_layers: ", "cap_layers: x", "weights.dram.cap_layers=x.*whole number"),
        ("queue_depth: ", "queue_dept: ", "weights.ssd.queue_dept.*did you mean queue_depth"),
        ("page_tokens: ", "page_tokens: -", "page_tokens"),
        ("\nbatch: ", "\nbach: ", "bach: no such section.*did you mean batch"),
        ("\nprefill_chunk_tokens: ", "\n# ", "prefill_chunk_tokens: missing"),
        ("\n  layers: 6", "\n  layers: 0", "model.layers=0"),
        ("kind: ffn, layers: 0-5", "kind: ffn, layers: 0-4", "model.units: no row of kind ffn for layer 5 of 6"),
        ("kind: ffn, layers: 0-5", "kind: ffn, layers: all", "model.units.1..layers=all: must be numbers and spans within 0 to 5"),
        ("kind: ffn, layers", "kind: fnn, layers", "model.units.1..kind=fnn: must be one of .*did you mean ffn"),
        (
            "format: BF16",
            "format: FB16",
            "model.units.0..format=FB16: no such format of weights; choose of BF16, F16, F32, FP8-..., .*; did you mean F16",
        ),
        ("kind: norm", "layers: 0-5, kind: norm", "norm belongs to no layer"),
        ("elements: ", "elements: -", "allowed: 1 or more"),
        ("kind: head", "kind: norm", "stands in two rows"),
        ("compute_dtype: bfloat16", "compute_dtype: bf16", "model.compute_dtype=bf16: must be one of bfloat16, float16, float32"),
        ("vocab: 1000", "vocab: many", "model.vocab=many.*whole number"),
        ("write_gbps: 1.0", "write_gbps: -1.0", "hardware.ssd.write_gbps=-1.0"),
        ("objective: latency", "objective: speed", "workload.objective=speed"),
        ("kv: {", "kv: {{", "not readable as YAML at line"),
        ("kv: {", "kv: 3 #", "kv: must be a mapping"),
    ],
)
def test_an_edit_that_cannot_be_is_refused_by_its_key(old: str, new: str, complaint: str, plan: Plan, tmp_path: Path) -> None:
    path = edited(plan, tmp_path / "plan.yaml", old, new)
    with pytest.raises(UserError, match=complaint) as refused:
        check_plan(read_plan(path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("vram_slots: 0", "vram_slots: 3", "experts.vram_slots=3; allowed: 0 without a GPU"),
        ("dram_slots: 16", "dram_slots: 1", "experts.dram_slots=1; allowed: 3 to 16"),
        ("dram_slots: 16", "dram_slots: 17", "experts.dram_slots=17; allowed: 3 to 16"),
        ("policy: mix", "policy: mixed", "experts.policy=mixed: must be one of lru, .*did you mean mix"),
        ("prefetch: 0", "prefetch: 3", "experts.prefetch=3; allowed: 0 to 2"),
        ("read_ahead: 0", "read_ahead: 1", "experts.read_ahead=1; allowed: 0 without a GPU, where experts.prefetch"),
        ("in_flight: 2\n  chunk", "in_flight: 0\n  chunk", "experts.in_flight=0; allowed: 1 to 8"),
        ("hit_rates: [0.0, ", "hit_rates: [0.5, ", "model.routers.hit_rates: 0.5 with no slot"),
        ("hit_rates: [0.0, ", "hit_rates: [", "model.routers.hit_rates: 4 figures; allowed: 5"),
        (
            "expert, layers: 0-3",
            "expert, layers: 0-2 4",
            "model.units.2..layers=0-2 4: must be numbers and spans within 0 to 3",
        ),
        ("expert, layers: 0-3", "expert, layers: 0-2 2-3", "model.units: expert of layer 2 stands in two rows"),
        ("    - {kind: expert", "    # {kind: expert", "rows of kind expert go with routers"),
        ("top_k: 2", "top_k: 5", "model.routers.top_k=5 of count=4"),
        ("second_tier: 0.75", "second_tier: 1.2", "model.routers.second_tier=1.2; allowed: 0 to 1"),
        ("second_tier: 0.75", "second_tier: -0.1", "model.routers.second_tier=-0.1; allowed: 0 to 1"),
        ("second_tier: 0.75", "second_tier: half", "model.routers.second_tier=half"),
    ],
)
def test_an_edit_of_experts_that_cannot_be_is_refused(old: str, new: str, complaint: str, tmp_path: Path) -> None:
    path = edited(plan_of(spec_from_geometry(MIXTRAL)), tmp_path / "plan.yaml", old, new)
    with pytest.raises(UserError, match=complaint) as refused:
        check_plan(read_plan(path))
    assert "\n" not in str(refused.value)


def test_an_edit_of_expert_slots_or_hits_is_predicted_anew(tmp_path: Path) -> None:
    plan = plan_of(spec_from_geometry(MIXTRAL))
    fewer = read_plan(edited(plan, tmp_path / "plan.yaml", "dram_slots: 16", "dram_slots: 11"))
    assert fewer.prediction.ssd_bytes_per_token > plan.prediction.ssd_bytes_per_token == 0
    rates = fewer.model.experts.hit_rates
    write_plan(fewer, tmp_path / "fewer.yaml")
    old = f"hit_rates: [{', '.join(map(str, rates))}]"
    better = read_plan(edited(fewer, tmp_path / "fewer.yaml", old, "hit_rates: [0.0, 0.5, 1.0, 1.0, 1.0]"))
    assert better.prediction.experts_missed_dram < fewer.prediction.experts_missed_dram


def test_what_a_second_tier_adds_is_in_the_file_and_in_none_from_before_it_was_measured(tmp_path: Path) -> None:
    model, path = spec_from_geometry(MIXTRAL), tmp_path / "plan.yaml"
    plan = plan_of(replace(model, routers=replace(model.routers, second_tier=0.67)), gpu=True)
    write_plan(plan, path)
    assert read_plan(path) == plan
    path.write_text(path.read_text().replace("    second_tier: 0.67\n", ""))
    assert read_plan(path).model == model, "the default stands"


def test_an_edited_plan_is_predicted_anew(plan: Plan, tmp_path: Path) -> None:
    launch = plan.hardware.layer_launch_s
    path = edited(plan, tmp_path / "plan.yaml", f"layer_launch_s: {launch}", f"layer_launch_s: {2 * launch}")
    assert read_plan(path).prediction.decode_s_per_token > 1.5 * plan.prediction.decode_s_per_token


def test_a_broken_rule_is_read_and_named_by_the_check(plan: Plan, tmp_path: Path) -> None:
    hwm = plan.decisions.weights.dram.hwm_layers
    broken = read_plan(edited(plan, tmp_path / "plan.yaml", f"hwm_layers: {hwm}", f"hwm_layers: {hwm + 20}"))
    assert broken.decisions.weights.dram.hwm_layers == hwm + 20
    with pytest.raises(UserError, match=f"hwm_layers={hwm + 20}"):
        check_plan(broken)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="planner solve out="):
        read_plan(tmp_path / "none.yaml")


def test_a_binary_file_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match="not readable as YAML"):
        read_plan(tmp_path / "plan.yaml")
