"""The chains that a plan asks for."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.contract.decided.speculating import Drafter
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.cost import predict
from penstock.planner.contract.speculation.acceptance import Acceptance
from penstock.planner.contract.speculation.chain_length import ChainLength
from penstock.runtime.speculate.chains import Chains
from penstock.runtime.speculate.lookup_drafter import LookupDrafter
from penstock.runtime.speculate.model_drafter import ModelDrafter, Steps


def open_chains(plan: Plan, steps: Steps | None) -> Chains | None:
    """Drafts as ``plan`` decides them, where a model drafts by its ``steps``; None where nobody drafts."""
    decided = plan.decisions.speculation
    if decided.drafter is Drafter.none or not decided.tokens:
        return None

    def pass_s(tokens: int) -> float:
        decisions = replace(plan.decisions, speculation=replace(decided, tokens=tokens, proposes=1.0))
        return predict(plan.hardware, plan.model, plan.workload, decisions).decode_s_per_token

    planned = [pass_s(tokens) for tokens in range(decided.tokens + 1)]
    known = Acceptance(decided.acceptance, at=decided.acceptance_at)
    length = ChainLength(decided.tokens, planned.__getitem__, known)
    if steps is None or plan.drafter is None:
        return Chains(decided.drafter, LookupDrafter(), length)
    vocab = min(plan.model.vocab, plan.drafter.model.vocab)
    return Chains(decided.drafter, ModelDrafter(steps, vocab, plan.drafter.decisions.prefill_chunk_tokens), length)
