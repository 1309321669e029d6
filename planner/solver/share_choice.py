"""How the ranks of a plan share routed experts: as asked, or the faster way."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_seconds
from penstock.planner.contract.decided.decisions import ExpertPolicyName, MissedExperts
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.plan_ranks import check_ranks
from penstock.planner.contract.ranks.rank_model import never_sliced
from penstock.planner.solver.infeasible import Infeasible
from penstock.planner.solver.ranks_choice import answer_dealt
from penstock.planner.solver.terms.problem import Question

GAIN = 0.05
"""Of the work's seconds, that slices must spare: their words are those of one process within rounding alone."""

MOST_PIECES = 2**21
"""Of files, that all slices of one rank are read from: a piece takes a reading thread some 20 us and 300 bytes."""


def share_of(asked: ExpertShare | None, question: Question) -> tuple[ExpertShare, tuple[str, ...]]:
    """How the ranks of ``question`` share routed experts, and a note where the program chose. UserError for slices that cannot be. Costs
    two plans where there is a choice."""
    q = question
    if asked is ExpertShare.sliced:
        _check(q)
    if asked is not None or q.ranks == 1 or q.model.experts is None:
        return asked or ExpertShare.whole, ()
    if q.hardware.gpu is None or q.hardware.others or q.workload.is_served or _asks_routers(q):
        return ExpertShare.whole, ()
    if q.force.expert_host is MissedExperts.split:
        return ExpertShare.whole, ("each rank has whole experts, of its own layers: the CPU computes no slices",)
    if why := never_sliced(q.model, q.ranks) or _pieces(q):
        return ExpertShare.whole, (f"each rank has whole experts, of its own layers: {why}",)
    try:
        whole, cut = answer_dealt(q), answer_dealt(replace(q, share=ExpertShare.sliced))
    except Infeasible:
        return ExpertShare.whole, ()
    if _reads(cut) or cut.prediction.total_s > (1 - GAIN) * whole.prediction.total_s:
        return ExpertShare.whole, ()
    now, before = (show_seconds(plan.prediction.decode_s_per_token) for plan in (cut, whole))
    return ExpertShare.sliced, (f"each rank has a slice of every expert: {now} a token, and {before} with whole ones (moe.share=whole)",)


def _check(question: Question) -> None:
    q = question
    if q.ranks == 1:
        raise UserError("moe.share=sliced: one rank has whole experts; set ranks=2 or more, or leave moe.share out")
    if q.force.expert_host is MissedExperts.split:
        raise UserError("moe.share=sliced: slices of experts are computed by their cards; set moe.share=whole, or leave moe.host out")
    check_ranks(q.hardware, q.model, q.workload, q.ranks, ExpertShare.sliced)
    if _asks_routers(q):
        raise UserError("moe.share=sliced: moe.policy=lookahead asks routers of layers that a rank has not; leave moe.policy out")


def _pieces(question: Question) -> str:
    """Why reading slices would take too long; empty where it would not: a slice is a piece of each row of ``down_proj``."""
    experts = question.model.experts
    pieces = question.model.hidden * experts.units if experts else 0
    return f"slices would be read in {pieces / 1e6:.3g} million pieces" if pieces > MOST_PIECES else ""


def _asks_routers(question: Question) -> bool:
    return question.force.expert_policy is ExpertPolicyName.lookahead


def _reads(plan: Plan) -> bool:
    """Whether a step may read experts from the SSD: a slice there is a piece of each row of a matrix."""
    made, experts = plan.of_rank(0).decisions.experts, plan.of_rank(0).model.experts
    return made is not None and experts is not None and made.dram_slots < experts.units
