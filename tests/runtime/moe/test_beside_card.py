"""Missed experts that the CPU computes where they lie: the model says the same, and each of them is computed once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.gpt_oss_synth import gpt_oss_config, write_gpt_oss
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import ExpertSlots, MissedExperts
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.experts.routing_files import read_routings
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices import stages
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.routers import RecordedRouters
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.experts.products import beside_card
from penstock.runtime.experts.tiers.dram_experts import DramExperts
from tests.cli import HANGS_S
from tests.conftest import SHARED
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.support import HostCopier, decisions, plan_for, workload

CPU = torch.device("cpu")
TRAINED = SHARED / "models" / "tiny-mixtral"
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def random_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(3)
    config = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=6, num_experts_per_tok=3)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def host(gbps: float) -> HostRates:
    curve = Curve(((1, gbps), (8, gbps)))
    return HostRates(2, {"BF16": curve, "MXFP4": curve}, 0.0, 1.0, 1.0, f16_products={"F16": curve})


def plan_of(checkpoint: Path, batch: int, gbps: float = 20.0, missed: MissedExperts = MissedExperts.split, dram: int = 0) -> Plan:
    """VRAM has as few slots as there may be; DRAM every expert, unless ``dram`` says how many."""
    known = plan_for(checkpoint, decisions()).model.experts
    slots = ExpertSlots(fewest_slots(known), dram or known.units, chunk_bytes=1 << 12, host=missed)
    plan = plan_for(checkpoint, decisions(gpu=True, batch=batch, experts=slots), True)
    hardware = replace(plan.hardware, host=host(gbps), layer_launch_s=0.0)  # to ask the CPU takes longer than experts as small as these
    return replace(plan, hardware=hardware, prediction=predict(hardware, plan.model, plan.workload, plan.decisions))


def run(plan: Plan, checkpoint: Path, batch: Batch) -> tuple[Generation, dict]:
    with opened(plan, checkpoint, HostCopier()) as session:
        session.load(batch)
        made = session.generate(batch, Sampler(Sampling(), CPU), keep_logits=True)
        engine = session.engine
        before = engine.stage_totals().get("cpu")
        engine.stop()
        assert engine.stage_totals().get("cpu") == before, "what was booked stays booked"
        return made, {**engine.facts()["experts"], "cpu_bytes": before[0] if before else 0}


@pytest.mark.parametrize("prompts", [[[5, 9, 200, 31, 7]], [[5, 9, 200, 31, 7], [17, 250], [3, 4, 5]]])
@pytest.mark.parametrize("dram", [0, 9])
def test_a_model_says_the_same_with_experts_on_the_cpu(random_mixtral: Path, prompts: list[list[int]], dram: int) -> None:
    """One row a step, and three; all experts in DRAM, and half of them, whose others are read first."""
    batch = Batch(prompts=prompts, max_new_tokens=6, chunk_tokens=1 << 20)
    made, facts = run(plan_of(random_mixtral, len(prompts), dram=dram), random_mixtral, batch)
    want = said(AutoModelForCausalLM.from_pretrained(random_mixtral, dtype=torch.bfloat16).eval(), batch)
    assert made.tokens == want.tokens
    assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(made.logits, want.logits, strict=True))
    assert 0 < facts["computed_on_cpu"] < facts["vram"]["misses"]
    assert facts["cpu_bytes"] == facts["computed_on_cpu"] * plan_for(random_mixtral, decisions()).model.experts.expert_bytes


@pytest.mark.parametrize("prompts", [[[5, 9, 200, 31, 7]], [[5, 9, 200, 31, 7], [17, 250], [3, 4, 5]]])
def test_a_model_in_f16_says_the_same_with_experts_on_the_cpu(tmp_path: Path, prompts: list[list[int]]) -> None:
    torch.manual_seed(3)
    config = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=6, num_experts_per_tok=3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(tmp_path)
    batch = Batch(prompts=prompts, max_new_tokens=6, chunk_tokens=1 << 20)
    made, facts = run(plan_of(tmp_path, len(prompts)), tmp_path, batch)
    want = said(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16).eval(), batch)
    assert made.tokens == want.tokens and 0 < facts["computed_on_cpu"] < facts["vram"]["misses"]
    assert all(torch.allclose(a, b, atol=0.0025) for a, b in zip(made.logits, want.logits, strict=True))


@pytest.mark.parametrize("dram", [0, 12])
def test_coded_experts_with_biases_say_the_same(tmp_path: Path, dram: int) -> None:
    """gpt-oss in MXFP4, whose gate is clamped; all experts in DRAM, and half of them, so that slots hold one after the other."""
    config = gpt_oss_config({"layers": "3", "hidden": "64", "experts": "8", "vocab": "300"})
    write_gpt_oss(config | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}, tmp_path / "oss")
    batch = Batch(prompts=[[5, 9, 200, 31, 7]], max_new_tokens=8, chunk_tokens=1 << 20)
    made, facts = run(plan_of(tmp_path / "oss", 1, dram=dram), tmp_path / "oss", batch)
    want, _ = run(plan_of(tmp_path / "oss", 1, missed=MissedExperts.copied, dram=dram), tmp_path / "oss", batch)
    assert made.tokens == want.tokens and facts["computed_on_cpu"] > 0
    assert all(torch.allclose(a, b, atol=0.05) for a, b in zip(made.logits, want.logits, strict=True))


def test_no_step_makes_units_of_experts_that_dram_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made once, while weights load: the CPU and all copies of a visit would wait for it."""
    config = gpt_oss_config({"layers": "3", "hidden": "64", "experts": "8", "vocab": "300"})
    write_gpt_oss(config | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}, tmp_path / "oss")
    made, make = list[int](), beside_card.ExpertUnits._unit

    def counted(self: beside_card.ExpertUnits, tensors: Any) -> Any:
        made.append(1)
        return make(self, tensors)

    monkeypatch.setattr(beside_card.ExpertUnits, "_unit", counted)
    batch = Batch(prompts=[[5, 9, 200, 31, 7]], max_new_tokens=8, chunk_tokens=1 << 20)
    with opened(plan_of(tmp_path / "oss", 1), tmp_path / "oss", HostCopier()) as session:
        session.load(batch)
        loaded = len(made)
        session.generate(batch, Sampler(Sampling(), CPU))
        assert session.engine.facts()["experts"]["computed_on_cpu"] > 0
    assert loaded == len(made) >= 3 * 8


@pytest.mark.parametrize("gbps, missed", [(0.001, MissedExperts.split), (20.0, MissedExperts.copied)])
def test_a_slow_cpu_and_a_plan_without_it_compute_none(random_mixtral: Path, gbps: float, missed: MissedExperts) -> None:
    batch = Batch(prompts=[[5, 9, 200]], max_new_tokens=4, chunk_tokens=1 << 20)
    _, facts = run(plan_of(random_mixtral, 1, gbps, missed), random_mixtral, batch)
    assert not facts["computed_on_cpu"] and facts["vram"]["misses"]


def test_a_run_whose_cpu_has_no_product_copies_all_and_says_so(random_mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_card, "host_matrix_of", lambda *asked: None)
    batch, told = Batch(prompts=[[5, 9, 200]], max_new_tokens=4, chunk_tokens=1 << 20), list[str]()
    with opened(plan_of(random_mixtral, 1), random_mixtral, HostCopier(), tell=told.append) as session:
        session.load(batch)
        session.generate(batch, Sampler(Sampling(), CPU))
        assert session.engine.facts()["experts"]["computed_on_cpu"] is None
    assert [line for line in told if "all missed experts are copied" in line]


def test_what_is_read_finds_slots_while_the_cpu_has_the_kept_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight experts, of which DRAM keeps four: those that are read are to take their places, and come to more than it has transit slots."""
    torch.manual_seed(3)
    config = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=8, num_experts_per_tok=3)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    waits = DramExperts.next_parts

    def for_what_comes(dram: DramExperts, layer: int, experts: Collection[int], *asked: Any) -> Any:
        assert any((layer, expert) in dram._fetches for expert in experts), "nobody reads what is waited for"
        return waits(dram, layer, experts, *asked)

    monkeypatch.setattr(DramExperts, "next_parts", for_what_comes)
    draw = torch.Generator().manual_seed(1)
    batch = Batch([torch.randint(1, 300, (5,), generator=draw).tolist() for _ in range(6)], max_new_tokens=12, chunk_tokens=1 << 20)
    made, facts = run(plan_of(tmp_path, 6, dram=15), tmp_path, batch)
    assert made.tokens == said(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval(), batch).tokens
    assert facts["computed_on_cpu"] > 0 and facts["dram"]["misses"] > 0


def behind_reads(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` of DRAM's experts, called once no read is under way."""

    def waits(experts: DramExperts, *asked: Any) -> Any:
        until = time.perf_counter() + HANGS_S
        while any(fetch.under_way for fetch in [*experts._fetches.values()]):
            assert time.perf_counter() < until
            experts._hear(0.01)
        return method(experts, *asked)

    return waits


@pytest.mark.parametrize("dram", [0, 9])
def test_a_simulation_has_the_cpu_compute_the_same_experts(
    random_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dram: int
) -> None:
    """By the run's own routings: as many hits and misses in both tiers, as many experts on the CPU. Whoever looks finds reads over, as on
    an idle machine whose host takes no time: which of two comes first, and whether one that is dropped has come, changes what the next one
    finds."""
    for name in ("visit", "judge", "next_parts", "all_parts", "arrived", "release"):
        monkeypatch.setattr(DramExperts, name, behind_reads(getattr(DramExperts, name)))
    monkeypatch.setattr(stages, "asked_issue_s", lambda hardware: 0.0)  # such a host takes no time to ask
    work = workload(prompt_tokens=1, new_tokens=24)
    plan = plan_of(random_mixtral, 1, dram=dram)
    plan = replace(plan, workload=work, hardware=replace(plan.hardware, layer_launch_s=0.0))
    path = tmp_path / "routed.jsonl"
    with opened(plan, random_mixtral, HostCopier(), record=path) as session:
        batch = Batch(prompts=[[5]], max_new_tokens=24, chunk_tokens=1 << 20)
        session.load(batch)
        session.generate(batch, Sampler(Sampling(), CPU))
        ran = session.engine.facts()["experts"]
    acted = Simulation(plan, Options(), routers=RecordedRouters(read_routings(path), None)).run()
    found = {name: (ran[name]["hits"], ran[name]["misses"]) for name in ("vram", "dram")}
    assert {name: (counts.hits, counts.misses) for name, counts in acted.experts.items()} == found
    assert acted.computed_on_cpu == ran["computed_on_cpu"] > 0


@pytest.mark.skipif(not TRAINED.exists(), reason="the trained models are not here")
def test_greedy_texts_of_a_trained_model_are_equal() -> None:
    batch = Batch(prompts=[list(b"def main():")], max_new_tokens=24, chunk_tokens=1 << 20)
    with_cpu, facts = run(plan_of(TRAINED, 1), TRAINED, batch)
    without, _ = run(plan_of(TRAINED, 1, missed=MissedExperts.copied), TRAINED, batch)
    assert with_cpu.tokens == without.tokens and facts["computed_on_cpu"] > 20
