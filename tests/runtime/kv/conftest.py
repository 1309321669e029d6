from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.planner.contract.decided.decisions import KvPages
from penstock.planner.contract.plan.plan import Plan
from tests.runtime.kv.batches import TOKENS
from tests.runtime.kv.nursery import Nursery
from tests.support import decisions, machine, plan_for, save_tiny, workload


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    started = Nursery()
    yield started
    started.close()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of a model so slow that every page is worth its way."""
    checkpoint = save_tiny(tmp_path_factory.mktemp("tiers"), layers=3)
    made = plan_for(checkpoint, decisions(batch=3), work=workload(prompt_tokens=150))
    return replace(made, hardware=replace(made.hardware, cpu_dense_tflops=1e-6))


@pytest.fixture(scope="module")
def card_plan(plan: Plan) -> Plan:
    slow = replace(machine(True).gpu, dense_tflops=1e-6)
    made = replace(plan.decisions, kv=KvPages(TOKENS, 96, 0, 0))
    return replace(plan, hardware=replace(machine(True), gpu=slow), decisions=made)
