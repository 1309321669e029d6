"""What the routers of a simulation choose where nothing is recorded."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.experts.routing import Routings
from penstock.planner.contract.given.model import Experts
from penstock.planner.replay.replayed import replay
from penstock.planner.simulate.routers import DrawnRouters
from tests.planner.small import MB


@pytest.mark.parametrize("policy", [ExpertPolicyName.mix, ExpertPolicyName.lfu, ExpertPolicyName.lru, ExpertPolicyName.markov])
def test_every_policy_finds_of_experts_drawn_for_it_what_the_plan_expects(policy: ExpertPolicyName) -> None:
    """Behind prompts, too, which are drawn evenly."""
    experts = Experts(16, 2, MB, (0, 1), default_hit_rates(16, 2))
    routers, chosen, decode = DrawnRouters(experts, policy, 1), [], []
    for step in range(2000):
        prompt = step % 200 == 0
        layers = [routers.next(place, 1, 8 if prompt else 1, prompt).chosen for place in range(2)]
        chosen += [*np.stack(layers, 1)]
        decode += [not prompt] * len(layers[0])
    routings = Routings(np.array(chosen, np.int16), np.zeros(len(chosen), int), np.array(decode), 16)
    found = replay(routings, policy).kept
    for slots in (4, 8, 12):
        assert found.rate(slots) == pytest.approx(experts.hit_rates[slots], abs=0.02)
