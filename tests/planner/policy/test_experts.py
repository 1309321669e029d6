"""Expert policies: the same answers for the same routings, and what each of them values."""

from __future__ import annotations

import time

import numpy as np
import pytest

from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.policies import AheadScores, ExpertPolicy, make_expert_policy

LAYERS, COUNT, TOP_K = 3, 6, 2
POLICIES = list(ExpertPolicyName)


def routings(tokens: int, seed: int = 0) -> np.ndarray:
    """[tokens, LAYERS, TOP_K]"""
    random = np.random.default_rng(seed)
    return np.array([[random.permutation(COUNT)[:TOP_K] for _ in range(LAYERS)] for _ in range(tokens)])


def answers(policy: ExpertPolicy, routed: np.ndarray, prompt: np.ndarray | None = None) -> list[np.ndarray]:
    """What it said of worth and of the coming use, visit by visit."""
    said: list[np.ndarray] = []
    random = np.random.default_rng(9)
    if prompt is not None:
        for layer in range(LAYERS):
            policy.study(layer, prompt[:, layer])
    for token in routed:
        for layer, experts in enumerate(token.tolist()):
            said.append(policy.foresee(layer).copy())
            policy.observe(layer, experts, random.normal(size=COUNT))
            said.append(policy.worth(layer).copy())
    return said


def driven(name: str, layer_experts: list[list[int]]) -> ExpertPolicy:
    """A policy of one layer after these visits."""
    policy = make_expert_policy(ExpertPolicyName(name), 1, COUNT, len(layer_experts[0]))
    for experts in layer_experts:
        policy.observe(0, experts)
    return policy


def best(worth: np.ndarray, most: int) -> set[int]:
    return set(np.argsort(-worth, kind="stable")[:most].tolist())


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_routings_get_the_same_answers_at_any_hour(name: ExpertPolicyName, monkeypatch: pytest.MonkeyPatch) -> None:
    routed, prompt = routings(40), routings(10, seed=1)
    first = answers(make_expert_policy(name, LAYERS, COUNT, TOP_K), routed, prompt)
    for clock in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: pytest.fail("the clock was asked"))
    second = answers(make_expert_policy(name, LAYERS, COUNT, TOP_K), routed, prompt)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_foreseen_is_a_probability_and_worth_is_finite(name: ExpertPolicyName) -> None:
    said = answers(make_expert_policy(name, LAYERS, COUNT, TOP_K), routings(60), routings(10, seed=1))
    assert all(np.isfinite(each).all() for each in said)
    assert all((foreseen >= 0).all() and (foreseen <= 1).all() for foreseen in said[::2])


@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_may_use_more_experts_than_a_token(name: ExpertPolicyName) -> None:
    policy = make_expert_policy(name, 1, COUNT, TOP_K)
    for experts in ([0, 1, 2, 3], [3, 2], [5, 0, 1]):
        policy.observe(0, experts)
        assert np.isfinite(policy.worth(0)).all()


@pytest.mark.parametrize("name", ["lru", "lfu", "static", "gating", "markov"])
def test_a_studied_prompt_leaves_the_worth_of_the_same_steps(name: str) -> None:
    steps, prompt = (make_expert_policy(ExpertPolicyName(name), LAYERS, COUNT, TOP_K) for _ in range(2))
    routed = routings(30)
    for token in routed:
        for layer, experts in enumerate(token.tolist()):
            steps.observe(layer, experts)
    for layer in range(LAYERS):
        prompt.study(layer, routed[:, layer])
        np.testing.assert_allclose(prompt.worth(layer), steps.worth(layer))


def test_lru_keeps_what_came_last_and_of_one_token_the_likelier() -> None:
    assert best(driven("lru", [[0, 1], [2, 3]]).worth(0), 3) == {2, 3, 0}


def test_lfu_forgets_what_static_remembers() -> None:
    visits = [[0, 1]] * 100 + [[2, 3]] * 60
    assert best(driven("lfu", visits).worth(0), 2) == {2, 3}
    assert best(driven("static", visits).worth(0), 2) == {0, 1}


def test_gating_keeps_the_companion() -> None:
    policy = driven("gating", [[0, 1]] * 3 + [[2, 3]] * 5 + [[0, 4]])
    assert policy.worth(0)[1] > policy.worth(0)[3]


def test_markov_and_mix_foresee_what_always_follows() -> None:
    for name in ("markov", "mix"):
        policy = driven(name, [[0, 1], [2, 3], [4, 5]] * 60 + [[0, 1]])
        assert best(policy.foresee(0), 2) == {2, 3}
        assert best(policy.worth(0), 2) == {2, 3}
        assert policy.foresee(0)[[2, 3]].min() > 0.8 and policy.foresee(0)[[0, 1]].max() < 0.2


def test_mix_foresees_a_layer_from_the_one_before_it() -> None:
    random = np.random.default_rng(0)
    policy = make_expert_policy(ExpertPolicyName.mix, 2, COUNT, TOP_K)
    partner = np.array([3, 5, 1, 0, 2, 4])
    right = 0
    for _ in range(400):
        experts = random.permutation(COUNT)[:TOP_K]
        policy.observe(0, experts.tolist())
        right += best(policy.foresee(1), TOP_K) == set(partner[experts].tolist())
        policy.observe(1, partner[experts].tolist())
    assert right > 300


@pytest.mark.parametrize(("name", "needs"), [("lookahead", AheadScores.router), ("trajectory", AheadScores.centroids)])
def test_scores_of_the_layer_ahead_are_needed_and_followed(name: str, needs: AheadScores) -> None:
    policy = make_expert_policy(ExpertPolicyName(name), 2, COUNT, TOP_K)
    assert policy.needs_ahead is needs
    policy.observe(0, [0, 1], np.array([0.0, 9.0, 1.0, 8.0, 2.0, 3.0]))
    assert best(policy.foresee(1), 2) == {1, 3}
    policy.observe(1, [1, 3])
    with pytest.raises(ValueError, match="ahead"):
        policy.observe(0, [0, 1])
