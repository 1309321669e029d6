"""KV outside VRAM on a card: the same tokens wherever it lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import KvPages
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.validate import compare_logits, load_unstreamed
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.cuda import open_cuda
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for, save_tiny, workload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

LAYERS = 6
EQUAL = Batch(prompts=[list(range(3, 43)), list(range(50, 90))], max_new_tokens=24, chunk_tokens=1 << 20)
UNEQUAL = replace(EQUAL, prompts=[list(range(3, 40)), list(range(50, 91)), [7]], chunk_tokens=9)
CASES = {"all in DRAM": (0, 6, 0), "half in DRAM": (3, 3, 0), "all tiers": (2, 2, 2), "all on SSD": (0, 0, 6), "one in DRAM": (5, 1, 0)}


def _plan(checkpoint: Path, layers: tuple[int, int, int]) -> Plan:
    plan = plan_for(checkpoint, decisions(gpu=True, resident=(1, 2, 0), head_blocks=2), True, workload(kv_spill=True))
    made = replace(plan.decisions, kv=KvPages(64, *(count * 2 * 3 for count in layers)))
    return replace(plan, decisions=made, prediction=predict(plan.hardware, plan.model, plan.workload, made))


def _said(checkpoint: Path, layers: tuple[int, int, int], batches: list[Batch]) -> list[tuple[list[list[int]], list[torch.Tensor]]]:
    device = torch.device("cuda", 0)
    plan = _plan(checkpoint, layers)
    copier = open_cuda(Budget.of(plan), device)
    with opened(plan, checkpoint, copier, device) as session:
        session.load(max(batches, key=lambda b: len(b.prompts)))
        made = [session.generate(b, Sampler(Sampling(), device), keep_logits=True) for b in batches]
    return [(m.tokens, [one.logits for one in m.passes]) for m in made]


@pytest.mark.parametrize(("model_type", "window"), [("llama", None), ("mistral", 16), ("gemma2", 16), ("qwen3", None)])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_a_run_with_all_kv_in_vram(tmp_path: Path, model_type: str, window: int | None, case: str) -> None:
    checkpoint = save_tiny(tmp_path, model_type, layers=LAYERS, **({"sliding_window": window} if window else {}))
    batches = [EQUAL, UNEQUAL]
    want = _said(checkpoint, (LAYERS, 0, 0), batches)
    got = _said(checkpoint, CASES[case], batches)
    for (tokens, logits), (expected, unstreamed) in zip(got, want, strict=True):
        assert tokens == expected
        worst = max((a - b).abs().max().item() for a, b in zip(logits, unstreamed, strict=True) if a.numel())
        assert worst == 0, f"logits differ by {worst}"


def test_layers_that_the_cpu_attends_to_give_the_same_logits_but_for_rounding(tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path, layers=LAYERS)
    plain, device = _plan(checkpoint, (1, 5, 0)), torch.device("cuda", 0)
    made = replace(plain.decisions, kv=replace(plain.decisions.kv, host_layers=3), batch=3)
    hardware = replace(plain.hardware, host=HostRates(2, {}, 1e-5, 1.0, 1.0, 20.0, 1e-4))
    plan = replace(plain, hardware=hardware, decisions=made)
    with opened(plan, checkpoint, open_cuda(Budget.of(plan), device), device) as session:
        session.load(UNEQUAL)
        got = session.generate(UNEQUAL, Sampler(Sampling(), device), keep_logits=True)
        assert session.engine.outside.attention is not None and session.engine.outside.attention.refused is None
        assert session.engine.stage_totals()["cpu"][0]
    found = compare_logits(load_unstreamed(checkpoint, device), device, UNEQUAL, got, 64, lambda *_: None)
    assert found.within_rounding, found
