"""The integer program, solved: the fastest decisions, and of those within 0.5 % of the best time the ones that take least memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

import pulp

from penstock.planner.contract.bills.cost import objective_weights, with_wait
from penstock.planner.contract.decided.decisions import CachePolicy, Decisions, MissedExperts
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Objective, Workload
from penstock.planner.contract.prices.missed_experts import no_split
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.ranks.rank_parts import parts_of
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.solver.answer import decisions_of
from penstock.planner.solver.forced_rules import check_request
from penstock.planner.solver.infeasible import why_infeasible
from penstock.planner.solver.leftover import keep_more
from penstock.planner.solver.terms.bound import bound_s
from penstock.planner.solver.terms.formulation import Formulation
from penstock.planner.solver.terms.host_terms import most_host_blocks
from penstock.planner.solver.terms.linear import MB
from penstock.planner.solver.terms.menu import batch_menu, form_menu, ring_menu, served_chunks
from penstock.planner.solver.terms.problem import Problem, Question


@dataclass(frozen=True)
class Preferences:
    """What decides between plans that are as good as equally fast. Weights are shares of all memory for 100 % more of each, or
    for one more where it is counted."""

    slower_at_most: float = 0.005
    """How much slower than the best a plan may be for the sake of memory."""
    time: float = 1e-2
    """The whole workload's seconds."""
    streaming: float = 1.0
    """Streaming at all over a link if memory holds everything. That it hides behind compute is only predicted, as is that DRAM keeps the
    experts which VRAM does not."""
    traffic: float = 1e-4
    """Seconds of the links, also of those that nothing waits for."""
    beside: float = 1e-4
    """The CPU computing beside the card at all: worth as little as 1 % of the time."""
    head: float = 0.01
    """The CPU computing blocks of the LM head, as a share of the time: the law knows the end of a step less well than its layers."""
    split: float = 0.01
    """The CPU computing missed experts, as a share of the time: what it computes does not enter VRAM, which costs hits that the model does
    not see."""
    passes: float = 1e-3
    """Passes of the prefill, or their parts: matrix rates fall with fewer tokens at once, which the model does not see."""
    hurried: float = 0.02
    """A prefill whose launches take the host more than ``hurry`` of the time. A host that was probed at 0.7 ms a layer took 1.2 later,
    for minutes, and launched prompts 30 to 61 ms where recorded ones took 31 (docs/log.md, 2026-11-28)."""
    hurry: float = 0.5
    one_ffn_slot: float = 0.015
    """One slot of the ring for FFN units, as a share of the least time: prompts wait for it, and so does the first token."""
    parts: float = 0.02
    """One more pass for each prompt of a server, whose first token comes as much later. Larger passes take memory for activations alone."""
    headroom: float = 0.2
    """One more DRAM slot for streamed layers, if it costs no time. With the fewest slots, a late copy holds up the reads behind it."""
    kept: float = 5e-2
    """Keeping none of the earlier prompts that the workload names, where it costs no time."""
    load: float = 5e-2
    """Seconds to load: a rate of half the SSD's best is worth 5 % of memory, staging for the full rate rarely takes that much."""


PREFERENCES = Preferences()

ROUNDS = 4
"""Times that a program is solved again for what it misses."""


@dataclass(frozen=True)
class Solution:
    """``best_s`` is the least objective of any plan with the residents in the same forms; ``decisions`` come within 0.5 % of it."""

    decisions: Decisions
    best_s: float


@dataclass(frozen=True)
class Optimum:
    """Seconds of the fastest plan, before any is given up for the sake of memory."""

    batch: int
    prefill_s: float
    decode_s: float
    """One decode step: a token for each sequence of the batch."""
    total_s: float
    """What is minimised: see ``penstock.planner.contract.bills.cost.objective_weights``."""

    @property
    def token_s(self) -> float:
        """For one token of any sequence."""
        return self.decode_s / self.batch


def solve(hardware: HardwareProfile, model: ModelSpec, workload: Workload, force: Force | None = None) -> Decisions:
    """The decisions of the best plan. Raises ``Infeasible`` when none fits, ``UserError`` when a forced value breaks a rule."""
    return search(hardware, model, workload, force).decisions


def search(hardware: HardwareProfile, model: ModelSpec, workload: Workload, force: Force | None = None) -> Solution:
    """``solve`` with the best objective."""
    force = force or Force()
    problems = _problems(Question(hardware, model, workload, force))
    best, best_s = _best_batch(problems)
    if best is None:
        raise why_infeasible(replace(problems[0], force=force))
    return Solution(_least_memory(best), best_s)


def optimum(question: Question) -> Optimum | None:
    """What the fastest plan takes, without the plan; None when none fits. Costs one solve a batch. UserError as in ``solve``. Of several
    ranks as :func:`_problems` has it."""
    best, best_s = _best_batch(_problems(question))
    if best is None:
        return None
    prefill_s, decode_s = (pulp.value(ticks) * best.tick_s for ticks in (best.whole_prefill_t, best.whole_step_t))
    return Optimum(best.problem.batch, prefill_s, decode_s, best_s)


def nearest_first(question: Question, like: Decisions) -> Decisions | None:
    """A simple plan with the batch, the cache policy, the residents' forms, the prefill's passes and the CPU's share of missed experts of
    ``like``. Each tier is filled, the
    nearest first. To within half a percent the device is copied least; then the SSD is read least, through the fewest slots. KV of running
    sequences lies where the model computes. Forced decisions stay forced. None if that does not fit. Costs four solves. UserError as in
    ``solve``."""
    q = question.of_rank(0)
    check_request(q.hardware, q.model, q.workload, q.force)
    force = q.force.but(prefill_chunk_tokens=q.force.prefill_chunk_tokens or like.prefill_chunk_tokens)
    if q.hardware.gpu:
        ring = like.weights.vram if like.weights.host.count or like.weights.vram.ffn_slots else ring_menu(force)[0]
        force = force.but(vram_slots=ring.slots, vram_ffn_slots=ring.ffn_slots)
    if q.hardware.gpu and like.experts is not None:
        force = force.but(expert_host=like.experts.host)
    if not like.weights.host.head:
        force = force.but(host_head=0)
    plain = replace(q.workload, kv_spill=False)
    program = Formulation(Problem(q.hardware, q.model, plain, force, force.policy or like.weights.policy, like.batch, like.weights.forms))
    copied, read = program.each_pass.of(Resource.h2d), program.each_pass.of(Resource.ssd)
    for moved in (copied, read) if q.hardware.gpu else (read,):
        if not program.minimise(moved):
            return None
        program.add(moved <= pulp.value(moved) * (1 + PREFERENCES.slower_at_most))
    if not program.minimise(program.total_t):
        return None
    simple = _least_memory(program)
    return None if broken_rules(q.hardware, q.model, q.workload, simple) else simple


def _problems(question: Question) -> list[Problem]:
    """One for each batch, prompt tokens of a server's pass, way of missed experts, and form of residents, with and without blocks of the LM
    head on the CPU. Of several ranks those of the first, which has most. UserError for what can be no plan whatever is given."""
    q = question.of_rank(0)
    check_request(q.hardware, q.model, q.workload, q.force)
    policy = q.force.policy or CachePolicy.pinned
    forces = [q.force]
    if q.workload.is_served:
        forces = [q.force.but(prefill_chunk_tokens=chunk) for chunk in served_chunks(q.workload, q.force)]
    if q.force.expert_host is None and not no_split(q.hardware, q.model):
        forces = [force.but(expert_host=way) for force in forces for way in MissedExperts]
    menu = product(batch_menu(q.workload), forces, form_menu(q.hardware, q.model, q.force))
    problems = [Problem(q.hardware, q.model, q.workload, force, policy, batch, forms) for batch, force, forms in menu]
    return [one for problem in problems for one in _with_and_without_head(problem)]


def _with_and_without_head(problem: Problem) -> list[Problem]:
    """``problem`` as it is and, where the CPU may compute blocks of the LM head and need not, with none."""
    force = problem.force
    open_to_both = force.host_head is None and most_host_blocks(problem) > 0
    return [problem, replace(problem, force=force.but(host_head=0))] if open_to_both else [problem]


def _best_batch(problems: list[Problem]) -> tuple[Formulation | None, float]:
    """The fastest problem, trying those with the lowest bound first and stopping when no bound is below the best found. Residents that
    stay decoded take more memory, so they must be faster by more than is given up for that; so must a server's prompts in more passes, and
    missed experts or blocks of the LM head on the CPU."""
    best, best_s, least_s = None, float("inf"), float("inf")
    bounded = ((bound_s(problem), problem) for problem in problems)
    for least_possible_s, problem in sorted(bounded, key=itemgetter(0)):
        if least_possible_s >= least_s:
            break
        (program, seconds), more = _minimised(_for_cold_prompts(problem)), _handicap(problem)
        if seconds is not None and seconds * (1 + more) < least_s:
            best, best_s, least_s = program, seconds, seconds * (1 + more)
    return best, best_s


def _minimised(problem: Problem) -> tuple[Formulation, float | None]:
    """Its program, solved, and the objective; None where nothing fits. Of one token's visits the share that reads follows from what its
    answer misses, so it is solved again for what it has found, until it finds that."""
    program = Formulation(problem)
    seconds = _seconds(program)
    for _ in range(ROUNDS):
        if seconds is None or not program.experts.reads_apart:
            break
        found = program.experts.expected()
        if found.is_like(program.problem.expected):
            break
        program = Formulation(replace(problem, expected=found))
        seconds = _seconds(program)
    return program, seconds


def _handicap(problem: Problem) -> float:
    """Share of the time by which it must be faster than others."""
    work, chunk = problem.workload, problem.force.prefill_chunk_tokens
    parts = work.turn(problem.batch, chunk).parts if work.is_served and chunk else 1
    split = PREFERENCES.split if problem.force.expert_host is MissedExperts.split else 0.0
    head = PREFERENCES.head if problem.force.host_head is None and most_host_blocks(problem) else 0.0
    return (PREFERENCES.slower_at_most if problem.forms.decoded else 0.0) + PREFERENCES.parts * (parts - 1) + split + head


def _for_cold_prompts(problem: Problem) -> Problem:
    """The same with the prefill's passes of a plan that keeps nothing. Passes that are just large enough for the rest of restored prompts
    would slow a prompt that finds nothing, such as the first one."""
    if not problem.workload.kept_tokens or problem.force.prefill_chunk_tokens is not None:
        return problem
    cold = Formulation(replace(problem, workload=replace(problem.workload, kept_tokens=0)))
    if not cold.minimise(cold.total_t):
        return problem
    return replace(problem, force=problem.force.but(prefill_chunk_tokens=_least_memory(cold).prefill_chunk_tokens))


def _seconds(program: Formulation) -> float | None:
    p = program.problem
    if not program.minimise(program.total_t):
        return None
    if program.ring.takes_one_ffn_slot:
        least_t = pulp.value(program.total_t)
        if not program.minimise(program.total_t + PREFERENCES.one_ffn_slot * least_t * program.ring.one_ffn_slot):
            raise RuntimeError("the program found a best plan and lost it looking for one with two slots for FFN")
    return with_wait(p.workload, p.batch, pulp.value(program.total_t) * program.tick_s)


def _least_memory(program: Formulation) -> Decisions:
    """Second stage, on a program whose best time stands in its variables.

    Time to first token leaves decode free, so there the best decode is found first, among the best prefills.
    """
    p = program.problem
    best, slower = pulp.value(program.total_t), 1 + PREFERENCES.slower_at_most
    program.ring.settle()
    if p.workload.objective is Objective.ttft:
        program.add(program.whole_prefill_t <= pulp.value(program.whole_prefill_t) * slower)
        if not program.minimise(program.whole_step_t):
            raise RuntimeError("the program found a best prefill and lost it looking for the best decode")
        program.add(program.whole_step_t <= pulp.value(program.whole_step_t) * slower)
    else:
        program.add(program.total_t <= best * slower)
    memory = (p.hardware.vram_bytes + p.hardware.dram_bytes) / MB
    fastest = max(choice.gbps for choice in program.ssd_choices)
    load = pulp.lpSum(bit * (fastest / c.gbps) for bit, c in zip(program.ssd_bits, program.ssd_choices, strict=True))
    choices = list(zip(program.pass_bits, program.pass_choices, strict=True))
    in_time = PREFERENCES.hurry * pulp.value(program.whole_prefill_t) * program.tick_s
    hurried = pulp.lpSum(PREFERENCES.hurried * bit for bit, c in choices if c.phase.rest.issued > in_time)
    passes = pulp.lpSum(bit * (PREFERENCES.passes * c.phase.passes * parts_of(c.phase.rows, c.part_tokens)) for bit, c in choices)
    links = program.each_pass.of(Resource.ssd) + program.each_pass.of(Resource.h2d)
    links *= PREFERENCES.traffic * objective_weights(p.workload, p.batch, program.pass_choices[0].chunk_tokens)[1] / best
    streaming = program.ssd_busy + program.ring.busy + program.experts.copied + program.experts.read
    objective = (program.vram_mb + program.dram_mb) * (1 / memory) + program.total_t * (PREFERENCES.time / best)
    slots = PREFERENCES.headroom * program.spare_slots
    beside = PREFERENCES.beside * (program.host.any + program.attention.any)
    kept = program.kept.pages * (PREFERENCES.kept / max(1, program.kept.set.pages))
    if not program.minimise(
        objective + links + PREFERENCES.streaming * streaming + passes + hurried + PREFERENCES.load * load + beside - slots - kept
    ):
        raise RuntimeError("the program found a best plan and lost it in its second stage")
    decisions = keep_more(p.hardware, p.model, p.workload, decisions_of(program))
    broken = broken_rules(p.hardware, p.model, p.workload, decisions)
    if broken:
        raise RuntimeError(f"the program's answer breaks its own rules: {'; '.join(rule.message for rule in broken)}")
    return decisions
