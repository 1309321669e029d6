"""Each rule is broken once, and named."""

from dataclasses import replace

import pytest

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.placement import head_blocks
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.solver.program import solve
from tests.planner.small import GB, MB, machine, model, work

MACHINE, MODEL, WORK = machine(vram=GB, dram=GB), model(16), work()
PLAN = solve(MACHINE, MODEL, WORK)


def change(decisions, path, value):
    """``decisions`` with the field at dotted ``path`` set."""
    name, _, rest = path.partition(".")
    return replace(decisions, **{name: change(getattr(decisions, name), rest, value) if rest else value})


def names(decisions, hardware=MACHINE, m=MODEL, w=WORK):
    return [rule.name for rule in broken_rules(hardware, m, w, decisions)]


def test_a_solved_plan_breaks_no_rule():
    assert names(PLAN) == []


CAP = PLAN.weights.dram.cap_layers


@pytest.mark.parametrize(
    "path, value, rule",
    [
        ("weights.dram.prefetch_distance", CAP - 1, "cap <= prefetch_distance <= hwm"),
        ("weights.dram.prefetch_distance", CAP + 11, "cap <= prefetch_distance <= hwm"),
        ("weights.dram.hwm_layers", CAP + 2, "hwm = cap + k, 3 <= k <= 10"),
        ("weights.dram.hwm_layers", CAP + 11, "hwm = cap + k, 3 <= k <= 10"),
        ("weights.dram.cap_layers", 99, "cap <= layers through DRAM"),
        ("weights.dram.cap_layers", -1, "weights.dram.cap_layers range"),
        ("weights.dram.resident_layers", CAP + 1, "resident_layers = cap under pinned, 0 under rolling"),
        ("weights.vram.slots", PLAN.weights.vram.prefetch_distance + 1, "vram_slots >= vram_prefetch_distance + 2"),
        ("weights.vram.prefetch_distance", -1, "weights.vram.prefetch_distance range"),
        ("weights.vram.resident_units.attn", 17, "weights.vram.resident_units.attn range"),
        ("weights.vram.resident_units.ffn", -1, "weights.vram.resident_units.ffn range"),
        ("weights.vram.resident_units.head", 99, "weights.vram.resident_units.head range"),
        ("weights.embedding", Tier.ssd, "embedding tier"),
        ("weights.head_blocks", 0, "weights.head_blocks range"),
        ("weights.ssd.block_bytes", 4097, "block multiple of 4096"),
        ("weights.ssd.block_bytes", 0, "block multiple of 4096"),
        ("weights.ssd.queue_depth", 0, "weights.ssd.queue_depth range"),
        ("weights.ssd.staging_bytes", 4096, "staging >= block x queue depth"),
        ("weights.h2d.chunk_bytes", 0, "weights.h2d.chunk_bytes range"),
        ("weights.h2d.in_flight", 0, "weights.h2d.in_flight range"),
        ("kv.page_tokens", 48, "KV page size"),
        ("kv.vram_pages", 1, "KV pages for the workload"),
        ("kv.dram_pages", 1, "KV tier"),
        ("kv.vram_pages", -1, "kv.vram_pages range"),
        ("kv.reuse.vram_pages", -1, "kv.reuse.vram_pages range"),
        ("kv.reuse.dram_pages", -1, "kv.reuse.dram_pages range"),
        ("kv.reuse.ssd_bytes", -1, "kv.reuse.ssd_bytes range"),
        ("kv.reuse.ssd_bytes", 4096, "kept KV bytes on SSD"),
        ("kv.reuse.vram_pages", 10**6, "VRAM capacity"),
        ("kv.reuse.dram_pages", 10**6, "DRAM capacity"),
        ("kv.reuse.ssd_bytes", 10**15, "SSD capacity"),
        ("batch", 0, "batch range"),
        ("prefill_chunk_tokens", 0, "prefill_chunk_tokens range"),
        ("weights.vram.resident_units.ffn", 16, "VRAM capacity"),
        ("weights.ssd.staging_bytes", 2 * GB, "DRAM capacity"),
    ],
)
def test_each_rule_is_named_in_one_line_with_the_value_and_what_is_allowed(path, value, rule):
    broken = broken_rules(MACHINE, MODEL, WORK, change(PLAN, path, value))
    assert rule in [r.name for r in broken]
    message = next(r.message for r in broken if r.name == rule)
    assert "allowed" in message and "\n" not in message


def test_small_kv_pages_may_not_spill_to_ssd():
    w = replace(WORK, kv_spill=True)
    small = change(change(PLAN, "kv.page_tokens", 32), "kv.ssd_pages", 18)
    assert "KV page size on SSD" in names(small, w=w)


@pytest.mark.parametrize("tokens, kv_width", [(32, 256), (64, 8)])
def test_kept_pages_on_an_ssd_are_whole_blocks_a_layer(tokens, kv_width):
    m = replace(MODEL, kv_width=kv_width)
    kept = change(change(PLAN, "kv.page_tokens", tokens), "kv.reuse.ssd_bytes", GB)
    assert "kept KV page size on SSD" in names(kept, m=m)
    assert "kept KV page size on SSD" not in names(change(kept, "kv.page_tokens", 128), m=m)


def test_no_page_is_kept_in_vram_without_a_gpu():
    hardware = machine(vram=0, dram=4 * GB)
    plan = solve(hardware, MODEL, WORK)
    assert names(change(plan, "kv.reuse.dram_pages", 1), hardware) == []
    assert names(change(plan, "kv.reuse.vram_pages", 1), hardware) == ["kv.reuse.vram_pages range"]


def test_the_ssd_must_hold_the_weights_of_a_model_that_has_no_checkpoint_yet():
    assert names(PLAN, hardware=replace(MACHINE, ssd_bytes=GB)) == ["SSD capacity"]
    assert names(PLAN, hardware=replace(MACHINE, ssd_bytes=0), m=replace(MODEL, checkpoint="/data/small")) == []


def test_beside_a_checkpoint_the_ssd_must_hold_the_kv_alone():
    plan = change(change(PLAN, "kv.page_tokens", 64), "kv.reuse.ssd_bytes", GB)
    there = replace(MODEL, checkpoint="/data/small")
    assert names(plan, hardware=replace(MACHINE, ssd_bytes=GB), m=there) == []
    (short,) = broken_rules(replace(MACHINE, ssd_bytes=GB - 1), there, WORK, plan)
    assert short.name == "SSD capacity" and "weights" not in short.message and "kv reuse 1" in short.message.replace("_", " ")


def test_a_plan_for_a_gpu_is_refused_without_one():
    alone = machine(vram=0, dram=GB)
    assert "no VRAM ring without a GPU" in names(PLAN, hardware=alone)
    assert "KV tier" in names(replace(solve(alone, MODEL, WORK), kv=PLAN.kv), hardware=alone)


def test_a_dense_model_has_no_experts_section_and_a_moe_model_has():
    moe = model(16, experts=8)
    plan = solve(MACHINE, moe, WORK)
    assert names(plan, m=moe) == []
    assert "experts section" in names(plan) and "experts section" in names(PLAN, m=moe)


MOE = model(16, experts=8)
MOE_PLAN = solve(MACHINE, MOE, WORK)


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("vram_slots", 2, "expert slots"),
        ("vram_slots", 129, "expert slots"),
        ("dram_slots", 2, "expert slots"),
        ("dram_slots", 0, "expert slots"),
        ("dram_slots", 129, "expert slots"),
        ("prefetch", -1, "experts.prefetch range"),
        ("prefetch", 3, "experts.prefetch range"),
        ("in_flight", 0, "experts.in_flight range"),
        ("in_flight", 9, "experts.in_flight range"),
        ("chunk_bytes", 2**18 - 1, "experts.chunk_bytes range"),
        ("chunk_bytes", 2**26 + 1, "experts.chunk_bytes range"),
        ("vram_slots", 128, "VRAM capacity"),
        ("dram_slots", 128, "DRAM capacity"),
    ],
)
def test_each_rule_of_experts_is_named_in_one_line(field, value, rule):
    (broken,) = broken_rules(MACHINE, MOE, WORK, change(MOE_PLAN, f"experts.{field}", value))
    assert broken.name == rule and "allowed" in broken.message and "\n" not in broken.message


def test_fewer_slots_than_the_models_top_k_say_how_many_it_takes():
    m = replace(MOE, routers=replace(MOE.routers, top_k=5))
    (broken,) = broken_rules(MACHINE, m, WORK, change(MOE_PLAN, "experts.vram_slots", 4))
    assert "experts.vram_slots=4; allowed: 5 to 128" in broken.message and broken.message.endswith("set vram_slots=5")


def test_dram_needs_no_slots_where_vram_has_one_for_every_expert_and_there_are_none_in_vram_without_a_gpu():
    large = machine(vram=16 * GB, dram=GB)
    made = solve(large, MOE, WORK)
    assert (made.experts.vram_slots, made.experts.dram_slots) == (128, 0) and names(made, large, MOE) == []
    cpu = machine(vram=0, dram=GB)
    made = solve(cpu, MOE, WORK)
    assert names(made, cpu, MOE) == [] and names(change(made, "experts.vram_slots", 3), cpu, MOE) == ["expert slots"]


def test_a_head_block_may_be_as_large_as_an_attention_unit_where_ffn_units_are_routers():
    assert head_blocks(model(4, table=60 * MB, experts=8)) == 2


def test_a_head_block_fits_an_ffn_slot():
    m = model(4, ffn=12 * MB, table=60 * MB)
    assert head_blocks(m) == 5
    plan = solve(MACHINE, m, WORK)
    assert plan.weights.head_blocks == 5
    one = change(change(plan, "weights.head_blocks", 1), "weights.vram.resident_units.head", 0)
    assert names(one, m=m) == ["head block <= FFN unit"]


def test_the_least_cache_is_no_residents_and_three_layers_of_headroom():
    w = PLAN.weights
    least = replace(w, dram=replace(w.dram, cap_layers=0, hwm_layers=LIMITS.headroom_min, prefetch_distance=3, resident_layers=0))
    assert names(replace(PLAN, weights=least)) == []
