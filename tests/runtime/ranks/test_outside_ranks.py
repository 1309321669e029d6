"""KV of running sequences outside VRAM, of several ranks: each brings its own layers'. Host memory stands for their cards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.planner.contract.decided.decisions import Decisions, KvPages
from penstock.planner.contract.decided.kv_tiers import kv_tiers
from penstock.planner.contract.plan.planfile import plan_of_text, plan_text
from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.company.company import Company
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.memory.ground import OpenCard
from tests.runtime.ranks.company import EVERY, alike, dealt_plan
from tests.support import GPU, HostCopier, decisions, machine, save_tiny

CPU = torch.device("cpu")
PROMPTS = [list(range(3, 40)), list(range(50, 91)), [7, 8, 9]]
LAYERS = 6
PLACES = {"all in DRAM": (0, 3, 0), "all tiers": (1, 1, 1)} | ({"all on SSD": (0, 0, 3), "a third": (2, 0, 1)} if EVERY else {})
"""Of each rank's three layers: in VRAM, DRAM, on the SSD."""


BATCH = Batch(prompts=PROMPTS, max_new_tokens=7, chunk_tokens=1 << 20)


def generated(made: Decisions, ranks: int, checkpoint: Path, company: Company, gpu: bool) -> tuple[Generation, list[dict[str, Any]]]:
    card = machine(True, devices=tuple(range(ranks))) if gpu else machine(cpu_cores=2, cpu_threads=ranks)
    plan = plan_of_text(plan_text(dealt_plan(checkpoint, made, ranks, card, batch=3, requests=3, kv_spill=True)))
    ground = OpenCard(HostCopier() if gpu else None, CPU, company if ranks > 1 else None)
    with open_session(plan, checkpoint, ground, EngineOptions(one_card=ranks > 1)) as session:
        session.load(BATCH)
        found = session.generate(BATCH, Sampler(Sampling(), CPU), keep_logits=True)
        session.book("decode")
        return found, session.rank.reports() if session.rank else []


def placed(places: tuple[int, int, int], gpu: bool, parts: int = 0) -> Decisions:
    made = decisions(gpu=gpu, batch=3, resident=(1, 2, 0) if gpu else (0, 0, 0))
    return replace(made, kv=KvPages(64, *(count * 4 for count in places)), prefill_part_tokens=parts)


def check(places: tuple[int, int, int], gpu: bool, parts: int, checkpoint: Path, company: Company) -> dict[str, Any]:
    """Bit for bit as where all KV lies where the ranks compute; whole passes as one process has them -> what the other rank reports."""
    home = placed((3, 0, 0) if gpu else (0, 3, 0), gpu, parts)
    want, _ = generated(home, 2 if parts else 1, checkpoint, company, gpu)
    found, (other,) = generated(placed(places, gpu, parts), 2, checkpoint, company, gpu)
    assert found.tokens == want.tokens and other["part_tokens"] == parts
    assert all(map(alike, found.logits, want.logits))
    return other["stages"]["decode"]


@pytest.mark.parametrize("parts", [0, 7], ids=["whole", "in parts"])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_two_ranks_bring_kv_to_their_cards(tmp_path: Path, company: Company, places: tuple[int, int, int], parts: int) -> None:
    """A layer's KV is brought once for all parts of a pass."""
    assert check(places, True, parts, save_tiny(tmp_path, layers=LAYERS), company)["d2h"]["bytes"] > 0


@pytest.mark.parametrize("parts", [0, 7], ids=["whole", "in parts"])
def test_without_cards_kv_passes_through_the_drive(tmp_path: Path, company: Company, parts: int) -> None:
    assert check((0, 1, 2), False, parts, save_tiny(tmp_path, layers=LAYERS), company)["ssd_write"]["bytes"] > 0


def test_a_prefix_that_both_ranks_kept_is_restored_to_where_each_has_its_layers(tmp_path: Path, company: Company) -> None:
    checkpoint, made = save_tiny(tmp_path / "model", layers=LAYERS), placed((1, 2, 0), True)
    slow = replace(machine(True, devices=(0, 1)), gpu=replace(GPU, dense_tflops=1e-6))  # every page is worth its way
    plan = dealt_plan(checkpoint, made, 2, slow, batch=3, requests=3, kv_spill=True)
    said, batch = [], replace(BATCH, prompts=[[(7 * i + at) % 251 + 1 for i in range(150)] for at in range(3)])
    for _ in range(2):
        ground = OpenCard(HostCopier(), CPU, company)
        reuse = ReuseConfig(dir=str(tmp_path / "kept"), read_gbps=1e9)
        with open_session(plan, checkpoint, ground, EngineOptions(one_card=True), reuse) as session:
            session.load(batch)
            found = session.generate(batch, Sampler(Sampling(), CPU), keep_logits=True)
            session.flush()
            said.append((found, [session.kept_facts(), *(report["kv_reuse"] for report in session.rank.reports())]))
    (cold, written), (warm, restored) = said
    assert [each["pages_written"] for each in written] == [6, 6] and sum(restored[0]["restored_tokens"].values()) == 3 * 128
    assert warm.tokens == cold.tokens and (warm.logits[-1] - cold.logits[-1]).abs().max() < 2**-6 * cold.logits[-1].abs().max()


def test_the_layers_outside_are_as_many_of_each_rank(tmp_path: Path) -> None:
    plan = dealt_plan(save_tiny(tmp_path, layers=LAYERS), placed((1, 1, 1), True, 0), 2, machine(True, devices=(0, 1)), kv_spill=True)
    tiers = [kv_tiers(one.model.layers, one.decisions.kv) for one in plan.each_rank]
    assert tiers[0] == tiers[1] and len(set(tiers[0])) == 3
