"""What the pool takes is what the plan counts, wherever layers' KV lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import KvPages, KvReuse
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import dram_use, vram_use
from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.session import Session
from penstock.runtime.memory.ground import OpenCard
from tests.runtime.sessions import CPU
from tests.support import HostCopier, decisions, plan_for, save_tiny, workload

A_LAYER = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("memory"))


def plan_of(checkpoint: Path, layers: tuple[int, int, int], kept: int = 0) -> Plan:
    plan = plan_for(checkpoint, decisions(gpu=True), True, workload(kv_spill=True))
    made = replace(plan.decisions, kv=KvPages(64, *(count * A_LAYER for count in layers), KvReuse(kept, 2 * kept, 0)))
    return replace(plan, decisions=made, prediction=predict(plan.hardware, plan.model, plan.workload, made))


def taken_on_card(session: Session) -> int:
    """Bytes of the allocations that the pool's layers lie in."""
    storages = {held.untyped_storage().data_ptr(): held.untyped_storage().nbytes() for held in session.engine.kv.buffers().values()}
    return sum(storages.values())


@pytest.mark.parametrize("layers", [(6, 0, 0), (3, 3, 0), (0, 6, 0), (1, 2, 3)])
@pytest.mark.parametrize("kept", [0, 5])
def test_the_pool_takes_what_the_plan_counts(checkpoint: Path, layers: tuple[int, int, int], kept: int) -> None:
    if kept and layers != (6, 0, 0):
        pytest.skip("pages are kept in VRAM where all layers lie there")
    plan = plan_of(checkpoint, layers, kept)
    question = plan.hardware, plan.model, plan.workload, plan.decisions
    on_card, in_dram = vram_use(*question), dram_use(*question)
    with open_session(plan, checkpoint, OpenCard(HostCopier(), CPU), reuse=ReuseConfig()) as session:
        session.load(Batch([[1, 2]], 2, 1 << 20))
        engine = session.engine
        assert taken_on_card(session) == on_card["kv"] + on_card["kv_reuse"]
        assert engine.kv.pages.slots == A_LAYER + kept
        assert sum(slot.numel() for slot in engine.card.kv_slots) == on_card["kv_ring"]
        assert sum(region.numel() for region in engine.outside.regions.values()) == in_dram["kv"]
        assert engine.card.bounce.numel() == on_card["kv_bounce"] and engine.page_memory.tensor.numel() == in_dram["kv_reuse"]
