"""Ranks that are started once and kept: sessions of plans for some of them, led by the test's own process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.decisions import Decisions, Tier
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.plan_ranks import Ranks
from penstock.planner.contract.plan.rank_predictions import predict_ranks
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.ranks.rank_model import model_of_rank
from penstock.runtime.asked.run_schema import CpuProduct, ReuseConfig
from penstock.runtime.beside.host_library import Level, machine_level
from penstock.runtime.company.company import Company
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.session import Session
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.memory.ground import OpenCard
from tests.support import machine, workload

EVERY = os.environ.get("PENSTOCK_RANKS") == "all"
"""Whether all cases run, as in `make test-ranks`: the others are those that find most, in few seconds."""


def dealt_plan(
    checkpoint: Path,
    made: Decisions,
    dealt: int | tuple[int, ...],
    card: HardwareProfile | None = None,
    share: ExpertShare = ExpertShare.whole,
    **work: Any,
) -> Plan:
    """A plan of so many ranks, or of ranks with so many layers each, that all decide ``made``, whose KV pages are those of
    each layer, and experts' slots those of each rank. Without a machine ``card`` they compute on the CPU."""
    model, asked = spec_from_checkpoint(checkpoint), workload(**work)
    dealing = Dealing.even(dealt, model.layers, share) if isinstance(dealt, int) else Dealing(dealt, share)
    count = dealing.count
    hardware = card or machine(cpu_cores=count, cpu_threads=count)

    def of(part: ModelSpec) -> Decisions:
        kv = replace(made.kv, **{f"{tier}_pages": made.kv.of(tier) * part.layers for tier in Tier})
        return replace(made, kv=kv, experts=made.experts if part.experts else None)

    decided = [of(model_of_rank(model, dealing, rank)) for rank in range(count)]
    predicted = predict_ranks(hardware, model, asked, decided, dealing)
    return Plan(hardware, model, asked, decided[0], predicted, ranks=Ranks.of(decided, dealing))


@contextmanager
def opened(plan: Plan, checkpoint: Path, company: Company | None, reuse: ReuseConfig | None = None, **options: Any) -> Iterator[Session]:
    """``checkpoint`` by ``plan``, led from here."""
    ground = OpenCard(None, torch.device("cpu"), company)
    with open_session(plan, checkpoint, ground, EngineOptions(cpu_product=CpuProduct.decode, **options), reuse) as session:
        yield session


def alike(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit. On CPUs with AMX but for one logit in 300 whose terms cancel: a product with fewer rows of the LM head has its sums in
    another order there. Another hidden state would change most logits."""
    if machine_level() < Level.amx:
        return torch.equal(got, want)
    return int((got != want).sum()) <= want.numel() // 300 and torch.allclose(got.float(), want.float(), atol=1e-4, rtol=0)
