"""Why a plan is as it is, gathered: what holds it back, what each resource and each decision is worth, and what would help most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_rate, show_seconds
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.recording import are_tabled, hops_launched, launched_because, prompts_launched_because
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import broken_in
from penstock.planner.contract.prices.launches import recorded_launch_s
from penstock.planner.explain.constraints import Constraint, constraints, launched_pieces_s, launches_bind, prompt_waits_s
from penstock.planner.explain.margins import NOTICEABLE, Margin, margins
from penstock.planner.explain.neighbours import Neighbour, candidates, neighbours
from penstock.planner.explain.one_more import OneMore, one_more
from penstock.planner.explain.purchases import Purchase, best_purchase, offers, purchases
from penstock.planner.explain.resources import resources
from penstock.planner.solver.acted_choice import Acted
from penstock.planner.solver.drafts.draft_choice import beside_bytes
from penstock.planner.solver.layer_counts import fastest
from penstock.planner.solver.planning import plan_of
from penstock.planner.solver.program import Optimum, nearest_first, optimum
from penstock.planner.solver.ranks_choice import choose_dealt
from penstock.planner.solver.simple_choice import Choice, Gain, choose
from penstock.planner.solver.terms.problem import Question

WORSE = 0.0075
"""A plan that is predicted to take longer than the program's own by this share was changed: the program gives up 0.5 % itself."""


@dataclass(frozen=True)
class Explanation:
    """``plan`` is what is explained: the one that was given, or the program's own where that breaks a rule."""

    question: Question
    plan: Plan
    broken: tuple[str, ...]
    """Rules that the plan that was given breaks."""
    own: Plan
    """What the program answers to the same question."""
    left: Gain | None
    """What the fastest plan gains over it, where it is the simple one for the doubt of that."""
    acted: Acted | None
    """How the program's own plan was simulated, where that chose it."""
    base: Optimum
    """The fastest plan's seconds; the program's own plan may take 0.5 % longer for the sake of memory."""
    constraints: tuple[Constraint, ...]
    margins: tuple[Margin, ...]
    purchases: tuple[Purchase, ...]
    neighbours: tuple[Neighbour, ...]
    one_more: OneMore

    @property
    def lost(self) -> float:
        """Share of what is minimised that the plan takes longer than the program's own, if it does."""
        return max(0.0, self.plan.prediction.total_s / self.own.prediction.total_s - 1)

    @property
    def is_simple(self) -> bool:
        """Whether the plan is the simple one, which the program took although another is faster by the profile."""
        return self.left is not None and self.plan.decisions == self.own.decisions

    @property
    def was_changed(self) -> bool:
        """Whether it is slower than what the program answers."""
        return self.lost > WORSE

    @property
    def best_buy(self) -> Purchase | None:
        return best_purchase(self.purchases)


def question_of(plan: Plan) -> Question:
    """What ``plan`` answers, with nothing forced but the expert policy, by which its hits are counted. A model that drafts beside the first
    of several ranks has what it takes, and the CPU the units that are its own then."""
    experts, drafting, taken = plan.decisions.experts, plan.decisions.speculation, (0, 0)
    force = Force(expert_policy=experts.policy if experts else None)
    if plan.ranks.count > 1 and drafting.model is not None:
        beside = beside_bytes(plan, drafting)
        taken, force = (beside[Tier.vram], beside[Tier.dram]), force.but(host_ffn=plan.decisions.weights.host.ffn)
    return Question(plan.hardware, plan.model, plan.workload, force, plan.ranks.count, plan.ranks.layers, plan.ranks.share, taken)


def explain(
    question: Question, given: Plan | None, share: float, advance: Callable[[int, int], None] = lambda done, total: None
) -> Explanation:
    """Explain ``given``, or the program's own plan where it is None. ``share`` is the step of each resource. Of a plan of several ranks the
    first one's is explained, since the others decide alike, and resources are those of the whole machine. Of unlike cards layers are dealt
    anew for each resource and purchase; what else the first one could have decided is compared on its own.

    Costs two solves a resource, one a purchase, two a decision and two for one user more, on as many cores as there are: 10 s on two cores
    of Zen 3 for 70B on `rtx5080`. A decision of a simple plan costs three times as many, since its neighbours are simple plans, too.
    ``advance`` is called with (done, all) steps. Raises ``penstock.planner.solver.infeasible.Infeasible`` where no plan fits.
    """
    dealt, acted = choose_dealt(question) if question.ranks > 1 else (None, None)
    if dealt is not None and (question.is_unlike or acted is not None):
        own = dealt.of_rank(0)
        choice = Choice(own.decisions, acted=acted)
    else:
        choice = choose(question)
        own = plan_of(question, choice)
    base = fastest(question)
    first = optimum(question) if question.is_unlike else base
    assert base is not None and first is not None
    broken = () if given is None else tuple(rule.message for rule in broken_in(given))
    plan = own if given is None or broken else given.of_rank(0)
    changed = plan.prediction.total_s / own.prediction.total_s - 1 > WORSE
    asked = candidates(question, plan.decisions, own=changed)
    offered = tuple(offers(question))
    total, done = 2 * len(resources(question.hardware, question.model)) + len(offered) + len(asked) + 2, 0

    def step() -> None:
        nonlocal done
        done += 1
        advance(done, total)

    found, bought = margins(question, base, share, step), purchases(question, offered, base, step)
    simple = choice.left is not None and plan.decisions == own.decisions
    found_by = (_taken(plan), partial(_simple, plan)) if simple else (first, optimum)
    beside = neighbours(question, found_by[0], asked, found_by[1], step)
    bound = constraints(plan, found)
    more = one_more(question, plan, step)
    return Explanation(question, plan, broken, own, choice.left, choice.acted, base, bound, found, bought, beside, more)


def _taken(plan: Plan) -> Optimum:
    """What ``plan`` takes."""
    p = plan.prediction
    return Optimum(plan.decisions.batch, p.prefill_s, p.decode_s_per_token, p.total_s)


def _simple(plan: Plan, question: Question) -> Optimum | None:
    """What the simple plan for ``question`` takes, one batch being asked for, with the rest as in ``plan``."""
    decisions = nearest_first(question, replace(plan.decisions, batch=question.workload.batch))
    return None if decisions is None else _taken(plan_of(question, Choice(decisions)))


def check_share(share: float) -> None:
    """UserError for a step that is none."""
    if not 0 < share < 1:
        raise UserError(f"step={share}: must be above 0 and below 1, a share of each resource; 0.1 is usual")


def advice(explanation: Explanation) -> tuple[str, ...]:
    """Sentences with figures: what to buy next, what else was tried, and what costs nothing."""
    e, best = explanation, explanation.best_buy
    free = [f"At no price: {p.offer.name} {_gain_text(p)}." for p in e.purchases if p.pays and not p.offer.is_bought]
    bought = sorted((p for p in e.purchases if p.offer.is_bought and p is not best), key=lambda p: -p.gain)
    if best is None:
        names = ", ".join(p.offer.name for p in bought)
        said = [f"Nothing: none of these makes the best plan faster by more than {NOTICEABLE:.2%}: {names}."]
        return (*said, *_launched(e.plan), *free)
    others = ", ".join(f"{p.offer.name} gains {f'{p.gain:.1%}' if p.pays else 'nothing'}" for p in bought)
    return (
        *(f"{said[:1].upper()}{said[1:]}." for said in (f"{best.offer.name} {_gain_text(best)}", others) if said),
        *_launched(e.plan),
        *free,
    )


def _launched(plan: Plan) -> Iterator[str]:
    """That a step waits for launches, and why it is launched kernel by kernel, or in pieces."""
    if launches_bind(plan):
        kv = plan.decisions.kv
        why = launched_because(plan.placement, kv.pages - kv.vram_pages) or hops_launched(plan.hardware, plan.model)
        why = why or "there is no Triton here, or none was probed"
        yield f"Decode waits for the host to launch kernels (hardware.layer_launch_s): steps are not recorded, {why}."
    if waits_s := prompt_waits_s(plan):
        prefill_s, kv, by = plan.prediction.prefill_s, plan.decisions.kv, "gpu.prompt_piece_s"
        how = "also where its layers are recorded around their attention"
        if not plan.decisions.recorded_prompt_tokens:
            why = prompts_launched_because(plan.hardware, plan.placement, kv.pages - kv.vram_pages) or "that was not faster"
            by, how = "layer_launch_s", f"layers are not recorded for prompts, {why}"
        yield f"A prefill waits {show_seconds(waits_s)} of {show_seconds(prefill_s)} for the host to launch (hardware.{by}): {how}."
    pieces_s, step_s = launched_pieces_s(plan), plan.prediction.decode_s_per_token
    if plan.model.experts and pieces_s > NOTICEABLE * step_s:
        pieces, hardware = len(plan.model.experts.layers), plan.hardware
        by_copies = are_tabled(plan.model, plan.decisions.batch) and recorded_launch_s(hardware) < hardware.layer_launch_s
        yield (
            f"Decode waits {show_seconds(pieces_s)} of {show_seconds(step_s)} for the host to launch {pieces} pieces"
            f" (hardware.{'gpu.copy_s' if by_copies else 'layer_launch_s'}): a step is recorded up to each layer's router, whose choice the"
            " host reads back."
        )


def step_text(margin: Margin) -> str:
    """The step with its unit."""
    return f"{margin.step:.3g} {margin.resource.unit}"


def _gain_text(purchase: Purchase) -> str:
    """Both phases as far as they change."""
    assert purchase.found is not None
    base, more, said = purchase.base, purchase.found, []
    if abs(more.token_s / base.token_s - 1) > NOTICEABLE:
        rates = f"{show_rate(1 / base.token_s)} to {show_rate(1 / more.token_s)} tokens/s"
        said.append(f"a token from {show_seconds(base.token_s)} to {show_seconds(more.token_s)}, {rates}")
    if abs(more.prefill_s / base.prefill_s - 1) > NOTICEABLE:
        said.append(f"a prefill from {show_seconds(base.prefill_s)} to {show_seconds(more.prefill_s)}")
    batch = f" with batch {more.batch}" if more.batch != base.batch and purchase.offer.is_bought else ""
    return f"takes {' and '.join(said) or 'off what is left'}{batch} ({purchase.gain:.1%} of the work's time)"


def document(explanation: Explanation) -> dict[str, Any]:
    """``explanation`` for JSON."""
    e, p = explanation, explanation.plan.prediction
    best = e.best_buy
    return {
        "feasible": True,
        "hardware": e.question.hardware.name,
        "model": e.question.model.name,
        "workload": e.question.workload.name,
        "objective": str(e.question.workload.objective),
        "batch": e.plan.decisions.batch,
        "broken_rules": list(e.broken),
        "predicted": {"decode_s_per_token": _six(p.decode_s_per_token), "ttft_s": _six(p.ttft_s), "total_s": _six(p.total_s)},
        "slower_than_best": _six(e.lost),
        "simple": {name: _six(value) for name, value in vars(e.left).items()} if e.left and e.is_simple else None,
        "best": _seconds(e.base),
        "constraints": [
            {"name": c.name, "grip": str(c.grip), "used": _six(c.used), "limit": _six(c.limit), "unit": c.unit, "note": c.note}
            for c in e.constraints
        ],
        "margins": [
            {
                "resource": m.resource.key, "unit": m.resource.unit, "amount": _six(m.amount), "step": _six(m.step),
                "saved_s_per_token_per_unit": _six(m.value_s), "gain": _six(m.gain), "loss": _six(m.loss),
                "more": m.more and _seconds(m.more), "less": m.less and _seconds(m.less),
            }
            for m in e.margins
        ],
        "neighbours": [
            {
                "key": n.key, "decided": _plain(n.decided), "value": _plain(n.value), "lost_s_per_token": _six(n.lost_s),
                "loss": _six(n.loss), "why": n.why or None,
            }
            for n in e.neighbours
        ],
        "purchases": [
            {
                "key": p.offer.key, "what": p.offer.name, "bought": p.offer.is_bought, "gain": _six(p.gain),
                "found": p.found and _seconds(p.found),
            }
            for p in e.purchases
        ],
        "one_more": {
            "rows": e.one_more.rows, "step_s": _six(e.one_more.step_s), "last_s": _six(e.one_more.last_s), "bytes": e.one_more.more_bytes,
            "base": e.one_more.base and _seconds(e.one_more.base), "more": e.one_more.more and _seconds(e.one_more.more),
        },
        "buy_next": best and {"key": best.offer.key, "what": best.offer.name, "gain": _six(best.gain)},
        "advice": " ".join(advice(e)),
    }  # fmt: skip


def _seconds(found: Optimum) -> dict[str, Any]:
    return {"batch": found.batch, "token_s": _six(found.token_s), "prefill_s": _six(found.prefill_s), "total_s": _six(found.total_s)}


def _six(value: float | None) -> float | None:
    """Six figures; what rounding leaves of a difference of nothing is nothing."""
    if value is None or isinstance(value, int):
        return value
    return 0.0 if abs(value) < 1e-12 else float(f"{value:.6g}")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value
