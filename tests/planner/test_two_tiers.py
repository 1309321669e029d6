"""Experts in VRAM and in DRAM, the rest on the SSD: what presets promise of them is what a simulation finds."""

from __future__ import annotations

from statistics import fmean

import pytest

from penstock.planner.cli import PROGRAM
from penstock.planner.contract.experts.expert_misses import misses
from penstock.planner.contract.experts.expert_slots import kept_at_first
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.ranks.ranks_act import RanksSimulation
from penstock.planner.solver.planning import make_plan


def solved(hardware: str, model: str, *typed: str) -> Plan:
    plan = make_plan(PROGRAM.configuration("solve", [f"hardware={hardware}", f"model={model}", "workload.new_tokens=64", *typed]))
    assert plan.of_rank(0).decisions.experts.dram_slots, "else there are no two tiers"
    return plan


@pytest.mark.parametrize(
    ("hardware", "model", "typed", "step"),
    [
        ("rtx4090", "gpt-oss-120b", ("workload.new_tokens=48", "moe.host=copied"), 0.08),
        ("h200", "qwen3-235b-a22b", ("workload.new_tokens=32",), 0.08),
        ("rtx4090", "mixtral8x7b", ("workload.new_tokens=32", "moe.policy=lru"), 0.07),
        ("rtx5080", "qwen3-next-80b-a3b", ("workload.new_tokens=48", "moe.policy=lru"), 0.07),
    ],
)
def test_presets_promise_what_is_simulated(hardware: str, model: str, typed: tuple[str, ...], step: float) -> None:
    """Drawn routers know recency alone, of which ``mix`` misses more than plans expect: LRU's hits are as planned. The last one's prompts
    read six times as many experts of a layer as pass through DRAM at once. gpt-oss copies what it misses: what the CPU computes never
    enters VRAM, so drawn routers then miss more than is planned."""
    plan = solved(hardware, model, *typed)
    record = Simulation(plan).run().record
    assert fmean(record.prefill_ns) / 1e9 == pytest.approx(plan.prediction.ttft_s, rel=0.05)
    assert fmean(record.step_ns) / 1e9 == pytest.approx(plan.prediction.decode_s_per_token, rel=step)


@pytest.mark.parametrize(("hardware", "model", "rows", "step"), [("rtx5080", "qwen3-next-80b-a3b", 4, 0.1)])
def test_rows_hide_what_the_ssd_reads_behind_what_they_compute(hardware: str, model: str, rows: int, step: float) -> None:
    """Each expert is computed as it comes."""
    typed = f"workload.batch={rows}", f"workload.requests={rows}", "moe.policy=lru", "moe.host=copied", "workload.new_tokens=16"
    plan = solved(hardware, model, *typed)
    record = Simulation(plan).run().record
    assert plan.decisions.batch == rows and record.counts["decode ssd bytes"]
    assert fmean(record.prefill_ns) / 1e9 == pytest.approx(plan.prediction.ttft_s, rel=0.03)
    assert fmean(record.step_ns) / 1e9 == pytest.approx(plan.prediction.decode_s_per_token, rel=step)


def test_the_first_prompt_reads_what_no_tier_was_filled_with() -> None:
    plan = solved("rtx4090", "gpt-oss-120b", "force.expert_dram_slots=2000", "workload.new_tokens=2")
    experts, slots = plan.model.experts, plan.decisions.experts
    left = experts.units - kept_at_first(experts, slots.vram_slots, slots.dram_slots)
    assert left < misses(plan.model, slots, plan.workload.prompt_tokens, True).dram - 100, "a later prompt reads more"
    read = Simulation(plan).run().record.counts["prefill ssd bytes"] / experts.expert_bytes
    assert read == pytest.approx(left, abs=experts.top_k + 1)
    assert plan.prediction.ttft_s < plan.prediction.prefill_s


@pytest.mark.parametrize("dram", ["120GiB", "90GiB"])
def test_two_unlike_cards_promise_a_prompt_that_is_simulated(dram: str) -> None:
    """Layers that come behind another one of their own rank have no experts ahead."""
    plan = solved("rtx5080-rtx3090", "mixtral8x7b", "ranks=2", f"hardware.dram_bytes={dram}", "workload.new_tokens=16", "moe.host=copied")
    assert plan.ranks.count == 2 and not plan.dealing.is_even
    record = RanksSimulation(plan, Options()).run()[0].record
    assert fmean(record.prefill_ns) / 1e9 == pytest.approx(plan.prediction.ttft_s, rel=0.08)
    assert fmean(record.step_ns) / 1e9 == pytest.approx(plan.prediction.decode_s_per_token, rel=0.07)


ROWS = (
    "workload.batch=8",
    "workload.requests=8",
    "workload.context_tokens=1024",
    "hardware.dram_bytes=400GB",
    "force.expert_dram_slots=128",
)


@pytest.mark.parametrize(
    ("hardware", "typed"),
    [
        ("rtx4090", ("moe.host=split", "moe.policy=lru", "workload.prompt_tokens=256", "workload.new_tokens=20")),
        ("rtx5080", ("moe.host=copied", "workload.prompt_tokens=64", "workload.new_tokens=16")),
    ],
)
def test_reads_go_on_where_few_slots_are_left(hardware: str, typed: tuple[str, ...]) -> None:
    """What was read is to take the places of experts that the CPU computes with: it gives them back before all else has come. An expert
    with a slot of VRAM is copied to its end, whether or not the one before it has found one."""
    plan = solved(hardware, "mixtral8x7b", *ROWS, *typed)
    record = Simulation(plan).run().record
    assert len(record.step_ns) == plan.workload.new_tokens - 1 and record.counts["decode ssd bytes"] > 0


def test_copies_of_a_token_begin_when_the_host_has_called_for_all_of_them() -> None:
    """Where its experts are recorded, too, nothing else hides these calls."""
    plan = solved("rtx5080", "qwen3-30b-a3b", "hardware.dram_bytes=400GB", "moe.host=copied", "moe.policy=lru", "workload.new_tokens=24")
    steps = Simulation(plan).run().record.step_ns
    assert fmean(steps[4:]) / 1e9 == pytest.approx(plan.prediction.decode_s_per_token, rel=0.05)
