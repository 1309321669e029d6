"""Where a model that drafts lies: whole where it computes, with room for the sequences that it drafts for."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.contract.decided.decisions import (
    CachePolicy,
    Decisions,
    DramWeights,
    ExpertSlots,
    KvPages,
    ResidentUnits,
    Tier,
    WeightDecisions,
)
from penstock.planner.contract.decided.speculating import MOST_DRAFTS
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload

MOST_CHUNK_TOKENS = 512
"""Of a prompt in one pass: all its weights are at hand, so longer passes are no faster, and activations take less."""

STATES_WAITING = 64 + MOST_DRAFTS + 1
"""Hidden states of a row that the model's further heads may have waiting for them."""


def states_bytes(model: ModelSpec, workload: Workload, drafted: Decisions) -> int:
    """Hidden states that further heads of ``model`` read: those of its longest pass, as computed, cut by rows, and put together; those
    that rows have waiting; three buffers of chains."""
    rows, chunk = drafted.batch, drafted.prefill_chunk_tokens
    longest = rows + chunk if workload.is_served else rows * min(chunk, workload.prompt_tokens)
    return (3 * longest + rows * (STATES_WAITING + 3 * (MOST_DRAFTS + 1))) * model.hidden * model.compute_dtype.nbytes


def resident(model: ModelSpec, drafted: Decisions, layers: int, gpu: bool) -> Decisions:
    """Decisions for ``model``, which drafts for one of ``layers`` layers with the decisions ``drafted``: as many sequences of as many
    tokens. With ``gpu`` it lies in VRAM, else in DRAM."""
    old, kv, experts = drafted.weights, drafted.kv, model.experts
    pages, here = kv.pages // layers * model.layers, model.layers
    headroom, cap = old.dram.hwm_layers - old.dram.cap_layers, 0 if gpu else here
    weights = WeightDecisions(
        policy=CachePolicy.pinned,
        embedding=Tier.vram if gpu and model.tied else Tier.dram,  # a step gathers a row of it: not worth its VRAM
        head_blocks=1,
        vram=replace(old.vram, resident_units=ResidentUnits(here, here, 1) if gpu else ResidentUnits(0, 0, 0)),
        dram=DramWeights(cap, cap + headroom, cap + headroom, cap),
        ssd=old.ssd,
        h2d=old.h2d,
    )
    return Decisions(
        weights=weights,
        kv=KvPages(kv.page_tokens, pages if gpu else 0, 0 if gpu else pages, 0),
        experts=None if experts is None else ExpertSlots(experts.units if gpu else 0, 0 if gpu else experts.units),
        batch=drafted.batch,
        prefill_chunk_tokens=min(drafted.prefill_chunk_tokens, MOST_CHUNK_TOKENS),
    )
