"""What an engine changes in a model, as one list."""

from __future__ import annotations

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.experts.expert_forward import ExpertsInTurn
from penstock.runtime.kv.attention.paged_attention import AttentionByRows
from penstock.runtime.model.converter import Converter
from penstock.runtime.model.fused.fused_gates import FusedGates
from penstock.runtime.model.fused.fused_norms import FusedNorms
from penstock.runtime.model.fused.fused_products import FusedProducts
from penstock.runtime.model.fused.fused_rotary import FusedRotary
from penstock.runtime.model.fused.listed_layers import LayersListed
from penstock.runtime.model.head import HeadInBlocks
from penstock.runtime.ranks.dealt_model import DealtModel


def converters(plan: Plan, dealt: DealtModel | None = None) -> list[Converter]:
    """For an engine that runs ``plan``, in the order in which they apply: attention, experts, head, what lies between products, and what
    leaves a rank's layers.

    Modules of stored formats are in place before these: ``build_skeleton`` follows the checkpoint.
    """
    found: list[Converter] = [AttentionByRows(), ExpertsInTurn()]
    if plan.hardware.gpu is not None:
        found.append(HeadInBlocks(plan.model.vocab, plan.decisions.weights.head_blocks))
        found += [LayersListed(), FusedNorms(), FusedGates(), FusedRotary(), FusedProducts()]
    return found if dealt is None else [*found, dealt]
