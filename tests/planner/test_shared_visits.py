"""Decode steps whose missed experts the CPU shares: what a plan promises of one row and of many is what a simulation finds."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from penstock.planner.cli import PROGRAM
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.experts.expert_misses import DENSE, visit
from penstock.planner.contract.experts.host_split import HostSplit
from penstock.planner.contract.experts.policies import make_expert_policy
from penstock.planner.contract.experts.routing_files import read_routings
from penstock.planner.contract.experts.shared_visits import SharedVisits, Unasked, missed_rows, shared_visits, spread_rows
from penstock.planner.contract.given.model import ALONE, SECOND_TIER, Experts
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.replay.replayed import hit_curve
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.routers import DrawnRouters
from penstock.planner.solver.planning import make_plan
from tests.planner.small import MB
from tests.planner.test_checkpoint import SHARED

RECORDED = SHARED.parent / "traces" / "tiny-mixtral.jsonl.xz"
QWEN = Experts(128, 8, 9 * MB, tuple(range(48)), default_hit_rates(128, 8, ExpertPolicyName.lru))


class PopularRouters(DrawnRouters):
    """Draws by lasting popularity, prompts, too: the first experts are the most popular. So VRAM, which begins with the first, finds what
    plans expect, whatever of the missed enters it."""

    def next(self, place: int, sequences: int, tokens: int, prompt: bool) -> Routing:
        return Routing(np.array([self._depths() for _ in range(sequences * tokens)]), prompt and tokens > 1)


def solved(hardware: str, model: str, rows: int, *typed: str) -> Plan:
    """The CPU shares missed experts of steps of ``rows`` rows."""
    asked = [f"workload.{key}={rows}" for key in ("batch", "requests")]
    asked += ["workload.prompt_tokens=256", "workload.context_tokens=1024", "workload.new_tokens=20", "hardware.dram_bytes=400GB"]
    return make_plan(PROGRAM.configuration("solve", [f"hardware={hardware}", f"model={model}", *asked, *typed]))


def step_s(plan: Plan, routers: DrawnRouters | None = None) -> float:
    """Once slots have settled."""
    return fmean(Simulation(plan, routers=routers).run().record.step_ns[4:]) / 1e9


@pytest.mark.parametrize("host", ["split", "copied"])
@pytest.mark.parametrize(
    ("hardware", "model", "rows"),
    [
        ("h100", "mixtral8x7b", 1),
        ("h200", "glm-4.5-air", 1),
        ("rtx4090", "qwen3-30b-a3b", 1),
        ("rtx5080", "mixtral8x7b", 2),
        ("rtx5080", "mixtral8x7b", 16),
    ],
)
def test_steps_are_promised_as_they_are_simulated(hardware: str, model: str, rows: int, host: str) -> None:
    plan = solved(hardware, model, rows, f"moe.host={host}", "moe.policy=static")
    assert plan.model.experts is not None
    routers = PopularRouters(plan.model.experts, ExpertPolicyName.static)
    assert plan.prediction.decode_s_per_token == pytest.approx(step_s(plan, routers), rel=0.04)


def test_visits_that_use_nearly_all_experts_are_promised_as_they_are_simulated() -> None:
    plan = solved("h100", "mixtral8x7b", 8, "moe.host=split", "moe.policy=lru", "workload.prompt_tokens=64")
    assert plan.prediction.decode_s_per_token == pytest.approx(step_s(plan), rel=0.07)


def test_steps_that_read_half_of_the_experts_are_promised_as_they_are_simulated() -> None:
    """Both tiers hold different ones behind many rows."""
    typed = "moe.host=split", "moe.policy=lru", "workload.prompt_tokens=64", "workload.new_tokens=16", "force.expert_dram_slots=3072"
    plan = solved("rtx4090", "qwen3-30b-a3b", 16, *typed)
    assert plan.prediction.experts_missed_dram > 0.05
    assert plan.prediction.decode_s_per_token == pytest.approx(step_s(plan), rel=0.13)


def test_missed_experts_have_as_many_rows_as_are_drawn() -> None:
    routers, rows, kept = DrawnRouters(QWEN, ExpertPolicyName.lru, 1), 16, 40
    counts = np.zeros(rows)
    for _ in range(100):
        latest = routers._order[0][kept:]
        chosen = routers.next(0, rows, 1, False).chosen
        for expert in latest:
            found = int((chosen == expert).any(1).sum())
            counts[found - 1] += found > 0
    law = missed_rows(QWEN, rows, kept, 8)
    assert sum(law) == pytest.approx(1) and law[:4] == pytest.approx(counts[:4] / counts.sum(), abs=0.03)
    assert missed_rows(QWEN, 4096, kept, 4)[-1] > 0.99, "more than a few of so many"


def test_the_cpu_takes_those_with_the_fewest_rows_and_none_that_come_unasked() -> None:
    assert spread_rows((0.5, 0.25, 0.25), 4) == [1, 1, 2, 3] and spread_rows((1.0,), 2) == [1, 1]
    split = HostSplit(1.0, (0.5, 5.0), 0.0)
    visits = shared_visits(split, (0.5, 0.5), 4)
    assert visits.taken == (0, 1, 1, 2, 2) and visits.host_s[4] == 1.0 and visits.link_s[4] == 2.0
    unasked = shared_visits(split, (1.0,), 3, Unasked(2, 2.0, 1.5, 0.5))
    assert unasked.taken[2:] == (0, 1) and unasked.link_s[2:] == (2.0, 2.0), "both that came are used"
    assert unasked.host_ends[2:] == (1.5, 1.5) and unasked.link_last == (0.0, 1.0, 1.0, 1.0), "the last of them is waited for"


def test_what_came_unasked_is_used_as_often_as_it_is_drawn() -> None:
    split = HostSplit(1.0, (0.5,), 0.0)
    visits = shared_visits(split, (1.0,), 4, Unasked(1, 4.0, 0.8, 0.2))
    assert visits.link_s[0] == pytest.approx(0.4), "six tenths of a copy that nobody uses are given up"
    assert visits.taken[1] == 0.75 and visits.host_ends[1] == pytest.approx(0.75 * 0.5 + 0.25 * 0.8), "one of four is it"
    between = shared_visits(split, (1.0,), 4, Unasked(1, 2.5, 0.8, 0.2)).taken[1]
    assert between == pytest.approx((1 / 2 + 2 / 3) / 2), "half of the layers miss two, half three"
    assert visits.taken[4] == 3.0 and visits.link_last[4] == 0.0, "the CPU is at the others for longer"


def test_copies_alone_are_as_many_as_are_missed() -> None:
    visits = SharedVisits.copied(2.0, 3, 1.5)
    assert visits.taken == (0, 0, 0, 0) and visits.link_s == (0.0, 2.0, 4.0, 6.0) and visits.link_ends == (0.0, 0.0, 1.0, 3.0)


def test_steps_of_more_rows_lose_fewer_experts_that_both_tiers_hold() -> None:
    lost = [60 + 40 - visit(QWEN, rows).kept_by_either(60, 40, 128) for rows in (1, 2, 4, 8, 16)]
    assert lost == sorted(lost, reverse=True) and lost[0] > 5 and lost[-1] < 2
    dense = visit(QWEN, 512)
    assert dense.spread >= DENSE and (dense.second_tier, dense.alone) == (SECOND_TIER, ALONE)


@pytest.mark.skipif(not RECORDED.exists(), reason="needs the shared routings")
@pytest.mark.parametrize(("every", "more"), [(1, 1.0), (10, 1.1), (None, 2.0)])
def test_hits_of_a_trained_router_hardly_change_while_one_missed_expert_of_ten_is_copied(every: int | None, more: float) -> None:
    """What the CPU computes does not enter VRAM. Where it computes all, VRAM holds what it held."""
    routings, missed, uses, at = read_routings(RECORDED), 0, 0, 0
    layers, count, kept = range(routings.layers), routings.count, 2
    policy = make_expert_policy(ExpertPolicyName.mix, routings.layers, count, routings.top_k)
    cache = ExpertCache(dict.fromkeys(layers, kept), (kept + 1) * routings.layers, count, policy)
    for layer in layers:
        assert [cache.keep(layer, expert) for expert in range(kept)]
    for token in np.flatnonzero(routings.decode)[:2000]:
        for layer in layers:
            routing = Routing(routings.experts[token : token + 1, layer].astype(np.intp), False)
            seen = cache.find(layer, routing.experts)
            cache.judge(layer, routing)
            copied = []
            for expert in seen.misses:
                at += 1
                copied += [expert] if every and not at % every else []
            for expert in copied:
                cache.take(layer, expert)
            for slot in cache.settle_all(layer, (*seen.hits, *copied)):
                cache.give_back(slot)
            missed, uses = missed + len(seen.misses), uses + len(routing.experts)
    promised = 1 - float(hit_curve(routings, ExpertPolicyName.mix)[kept])
    if every is None:
        assert missed / uses > more * promised
    else:
        assert missed / uses == pytest.approx(promised, rel=0.05 + more - 1)
