"""Why there is no plan, and the smallest changes that would make one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pulp

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.ranks.rank_model import never_spilled
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.solver.terms.formulation import Formulation
from penstock.planner.solver.terms.linear import MB
from penstock.planner.solver.terms.problem import Problem


@dataclass(frozen=True)
class SlackWeights:
    """How hard a missing GB is to come by: more VRAM is another card, DRAM another module, SSD space a deleted file."""

    vram: float = 4.0
    dram: float = 1.0
    ssd: float = 0.25


SLACK_WEIGHTS = SlackWeights()


class Infeasible(UserError):
    """No plan fits. ``shortages`` gives, for each capacity that is short, the bytes that mend it with all the others as they are."""

    def __init__(self, message: str, problem: Problem, shortages: dict[Tier, int]):
        super().__init__(message)
        self.problem = problem
        self.shortages = shortages


@dataclass(frozen=True)
class Mend:
    """One change that makes a plan fit, as overrides in words, and the problem with it."""

    change: str
    problem: Problem


def why_infeasible(problem: Problem) -> UserError:
    """The error for a problem without an answer: an elastic re-solve with one weighted slack per capacity.

    Costs one solve, and a few more for the alternatives that it names.
    """
    short_of = shortages(problem)
    if short_of is None:
        given = ", ".join(f"{Force.key(name)}={value}" for name, value in problem.force.given.items())
        return UserError(f"{given}: no plan holds all of these together (cap <= layers through DRAM, hwm = cap + k); drop one of them")
    short = " and ".join(f"{tier.upper()} is short by {_gb(_of_host(problem, tier, n))} GB" for tier, n in short_of.items())
    had = ", ".join(f"hardware.{tier}_bytes={_of_host(problem, tier, capacity(problem.hardware, tier)) / GB:.3f}GB" for tier in short_of)
    remedies = " or ".join(mend.change for mend in (*alternatives(problem), raised(problem, short_of)))
    return Infeasible(f"no plan fits: {short} (allowed: {had}); {remedies}", problem, short_of)


def _of_host(problem: Problem, tier: Tier, nbytes: int) -> int:
    """Bytes of a host's ``tier`` of which the rank that ``problem`` is about has ``nbytes``."""
    return nbytes if tier is Tier.vram else math.ceil(problem.hardware.divided_by * nbytes)


def capacity(hardware: HardwareProfile, tier: Tier) -> int:
    """Bytes of ``tier`` that a plan may use."""
    return {Tier.vram: hardware.vram_bytes, Tier.dram: hardware.dram_bytes, Tier.ssd: hardware.ssd_bytes}[tier]


def shortages(problem: Problem, only: Collection[Tier] = tuple(Tier)) -> dict[Tier, int] | None:
    """The least bytes, by ``SLACK_WEIGHTS``, that the capacities in ``only`` lack for a plan to fit; None where no bytes there mend it.
    Costs one solve."""
    elastic = Formulation(problem, elastic=True)
    for tier in Tier:
        if tier not in only:
            elastic.add(elastic.slack[tier] == 0)
    if not elastic.minimise(pulp.lpSum(getattr(SLACK_WEIGHTS, tier) * slack for tier, slack in elastic.slack.items())):
        return None
    lacks = {tier: slack.value() for tier, slack in elastic.slack.items() if slack.value() > 1e-6}
    return {tier: math.ceil(round(mb * MB, 1)) for tier, mb in lacks.items()}  # a whole number may come as a bit more


def raised(problem: Problem, short_of: dict[Tier, int]) -> Mend:
    """More hardware, in whole MB."""
    sizes: dict[str, Any] = {f"{tier}_bytes": math.ceil((capacity(problem.hardware, tier) + n) / MB) * MB for tier, n in short_of.items()}
    told = {tier: _of_host(problem, tier, sizes[f"{tier}_bytes"]) for tier in short_of}
    change = "raise to " + " ".join(f"hardware.{tier}_bytes={size / GB:.3f}GB" for tier, size in told.items())
    return Mend(change, replace(problem, hardware=replace(problem.hardware, **sizes)))


def alternatives(problem: Problem) -> Iterator[Mend]:
    """Overrides that fit without more hardware, each tried by a solve, those that change least first: an existing checkpoint, which needs
    no free space; forced decisions dropped; smaller KV pages, as none is kept; KV that streams; a shorter context; a smaller batch; a
    shorter prompt."""
    if not problem.model.checkpoint:
        exists = replace(problem, model=replace(problem.model, checkpoint="DIR"))
        if _fits(exists):
            yield Mend("set model=hf model.checkpoint=DIR where the checkpoint lies already", exists)
    free = replace(problem, force=Force(policy=problem.force.policy))
    if problem.force.given and _fits(free):
        keys = [key for key in problem.force.given if key != "policy"]
        enough = next((key for key in keys if _fits(replace(problem, force=problem.force.without(key)))), None)
        mended = replace(problem, force=problem.force.without(enough)) if enough else free
        yield Mend("drop " + ", ".join(map(Force.key, [enough] if enough else keys)), mended)
    unkept = replace(problem, workload=replace(problem.workload, kept_tokens=0))
    if problem.workload.kept_tokens and _fits(unkept):
        yield Mend("set workload.kept_tokens=0", unkept)
    spilled = replace(problem, workload=replace(problem.workload, kv_spill=True))
    stays = problem.workload.is_served or (problem.model.dealt is not None and never_spilled(problem.model))
    if not problem.workload.kv_spill and not stays and problem.hardware.ssd_write_gbps and _fits(spilled):
        yield Mend("set workload.kv_spill=true", spilled)
    work, room = problem.workload, problem.workload.context_tokens // 2
    while work.context_tokens > work.end_tokens:
        narrower = replace(problem, workload=replace(work, context_tokens=room if room > work.end_tokens else 0))
        if _fits(narrower):
            yield Mend(f"set workload.context_tokens={narrower.workload.context_tokens}", narrower)
            return
        if not narrower.workload.context_tokens:
            break
        room //= 2
    batch = problem.batch // 2
    while batch >= 1:
        smaller = replace(problem, batch=batch, workload=replace(problem.workload, batch=batch))
        if _fits(smaller):
            yield Mend(f"set workload.batch={batch}", smaller)
            return
        batch //= 2
    prompt = problem.workload.prompt_tokens // 2
    while prompt >= LIMITS.chunk_min_tokens:
        shorter = replace(problem, batch=1, workload=replace(work, batch=1, prompt_tokens=prompt, context_tokens=0))
        if _fits(shorter):
            also = "workload.batch=1 " * (problem.batch > 1) + "workload.context_tokens=0 " * (work.context_tokens > 0)
            yield Mend(f"set {also}workload.prompt_tokens={prompt}", shorter)
            return
        prompt //= 2


def _fits(problem: Problem) -> bool:
    return Formulation(problem).minimise(pulp.lpSum([]))


def _gb(nbytes: int) -> str:
    """Decimal GB, rounded up to the next MB."""
    return f"{math.ceil(nbytes / MB) / 1000:.3f}"
