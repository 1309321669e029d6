"""The schedules that a decode step of a plan can follow without anything being loaded."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.recording import launching
from penstock.planner.contract.decided.speculating import Drafter
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.rank_predictions import predict_ranks
from penstock.planner.contract.policy.schedule_choice import Schedule

OWN, ALONE = "the plan's", "streaming alone"


def alone(plan: Plan) -> Plan:
    """``plan``, predicted anew for steps of which the CPU computes nothing, on any rank: what VRAM does not keep streams. Units lie where
    they lay."""
    first, *others = (
        replace(one, weights=replace(one.weights, host=HostUnits()), kv=replace(one.kv, host_layers=0))
        for one in plan.ranks.decided(plan.decisions)
    )
    prediction = predict_ranks(plan.hardware, plan.model, plan.workload, (first, *others), plan.dealing)
    return replace(plan, decisions=first, prediction=prediction, ranks=replace(plan.ranks, others=tuple(others)))


def launching_prompts(plan: Plan) -> Plan:
    """``plan``, predicted anew for prompts that are launched kernel by kernel."""
    first, *others = (replace(one, recorded_prompt_tokens=0) for one in plan.ranks.decided(plan.decisions))
    prediction = predict_ranks(plan.hardware, plan.model, plan.workload, (first, *others), plan.dealing)
    return replace(plan, decisions=first, prediction=prediction, ranks=replace(plan.ranks, others=tuple(others)))


def launched_singly(plan: Plan) -> Plan:
    """``plan``, predicted anew for steps that are launched kernel by kernel."""
    hardware = launching(plan.hardware, plan.of_rank(0).model)
    decisions = replace(plan.decisions, weights=replace(plan.decisions.weights, host=HostUnits()))
    return replace(plan, hardware=hardware, decisions=decisions, prediction=predict(hardware, plan.model, plan.workload, decisions))


def beside(plan: Plan, ffn: int) -> Plan:
    """``plan`` of one rank, predicted anew for steps of which the CPU computes so many FFN units. Units lie where they lay."""
    decisions = replace(plan.decisions, weights=plan.decisions.weights.with_host_ffn(ffn))
    return replace(plan, decisions=decisions, prediction=predict(plan.hardware, plan.model, plan.workload, decisions))


def schedules_of(plan: Plan) -> tuple[Schedule, ...]:
    """The plan's own first; where the CPU computes units of any rank, or attends to layers, those near it and streaming alone."""
    own = Schedule(OWN, plan.prediction.decode_s_per_token, plan.decisions.weights.host.ffn)
    if not any(one.placement.host_units or one.decisions.kv.host_layers for one in plan.each_rank):
        return (own,)
    near = (Schedule(f"{count} ffn on the CPU", beside(plan, count).prediction.decode_s_per_token, count) for count in near_counts(plan))
    return own, *near, Schedule(ALONE, alone(plan).prediction.decode_s_per_token)


def near_counts(plan: Plan) -> tuple[int, ...]:
    """Of FFN units that the CPU computes in schedules near the plan's, the fewest first. None where steps verify drafts, which have
    schedules of their own, or where the CPU attends to layers."""
    host, outside = plan.decisions.weights.host, plan.placement.ffn.count(Tier.dram)
    if not host.ffn or plan.ranks.count > 1 or plan.decisions.kv.host_layers or plan.decisions.speculation.drafter is not Drafter.none:
        return ()
    counts = range(max(1, host.ffn - host.near), min(outside, host.ffn + host.near) + 1)
    return tuple(count for count in counts if count != host.ffn)
