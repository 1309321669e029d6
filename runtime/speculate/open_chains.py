"""The chains that a plan asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from penstock.planner.contract.decided.speculating import MOST_DRAFTS, Drafter
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.rank_predictions import predict_ranks
from penstock.planner.contract.speculation.acceptance import Acceptance
from penstock.planner.contract.speculation.chain_length import ChainLength
from penstock.runtime.model.further.further_layer import feed
from penstock.runtime.model.further.hidden_rows import HiddenRows
from penstock.runtime.speculate.chains import Chains
from penstock.runtime.speculate.drafter import Proposer
from penstock.runtime.speculate.further_drafter import FurtherDrafter
from penstock.runtime.speculate.lookup_drafter import LookupDrafter
from penstock.runtime.speculate.model_drafter import ModelDrafter, Steps


@dataclass(frozen=True)
class DraftingModel:
    """A model that drafts: its plan, its passes, and itself."""

    plan: Plan
    steps: Steps
    model: PreTrainedModel

    def proposer(self, kind: Drafter, target: PreTrainedModel, vocab: int, device: torch.device) -> Proposer:
        """What drafts for ``target``. Heads read its hidden states from now on: before steps are recorded."""
        chunk = self.plan.decisions.prefill_chunk_tokens
        if kind is not Drafter.mtp:
            at_once = chunk if self.plan.workload.is_served else None
            return ModelDrafter(self.steps, min(vocab, self.plan.model.vocab), chunk, at_once)
        few = self.plan.decisions.batch * (MOST_DRAFTS + 1)
        said, given, made = (HiddenRows(few, self.plan.model.hidden, target.dtype, device) for _ in range(3))
        said.follow(target)
        feed(self.model, given)
        made.follow(self.model)
        return FurtherDrafter(self.steps, said, given, made, chunk)


def open_chains(plan: Plan, target: PreTrainedModel, device: torch.device, drafting: DraftingModel | None) -> Chains | None:
    """Drafts for ``target`` as ``plan`` decides them, by ``drafting`` where a model drafts; None where nobody drafts."""
    decided = plan.decisions.speculation
    if decided.drafter is Drafter.none or not decided.tokens:
        return None

    def pass_s(tokens: int) -> float:
        some = replace(decided, tokens=tokens, proposes=1.0)
        first, others = replace(plan.decisions, speculation=some), [replace(other, speculation=some.beside) for other in plan.ranks.others]
        return predict_ranks(plan.hardware, plan.model, plan.workload, (first, *others), plan.dealing).decode_s_per_token

    planned = [pass_s(tokens) for tokens in range(decided.tokens + 1)]
    known = Acceptance(decided.acceptance, at=decided.acceptance_at)
    length = ChainLength(decided.tokens, planned.__getitem__, known)
    by = LookupDrafter() if drafting is None else drafting.proposer(decided.drafter, target, plan.model.vocab, device)
    return Chains(decided.drafter, by, length)
