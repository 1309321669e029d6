"""The schedules that a decode step of a plan can follow without anything being loaded."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.recording import launching
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.rank_predictions import predict_ranks
from penstock.planner.contract.policy.schedule_choice import Schedule
from penstock.planner.contract.prices.cost import predict

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


def schedules_of(plan: Plan) -> tuple[Schedule, ...]:
    """The plan's own first; streaming alone where the CPU computes units of any rank, or attends to layers."""
    own = Schedule(OWN, plan.prediction.decode_s_per_token)
    if not any(one.placement.host_units or one.decisions.kv.host_layers for one in plan.each_rank):
        return (own,)
    return own, Schedule(ALONE, alone(plan).prediction.decode_s_per_token)
