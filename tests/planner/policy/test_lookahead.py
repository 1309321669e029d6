"""lookahead: a router's scores of the coming layer are believed as far as they prove right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.routing import Size, made_up_routings
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.policies import AheadScores, ExpertPolicy, make_expert_policy
from penstock.planner.contract.experts.prefetch import Prefetch
from penstock.planner.contract.experts.routing import Routings
from penstock.planner.replay.comparison import compare
from penstock.planner.replay.replayed import Replay, replay

LAYERS = 4
TOKENS = 400
SHAPES = [(8, 2), (64, 8)]
"""Experts, top_k."""


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits)
    return shares / shares.sum(-1, keepdims=True)


def foreseen_exactly(count: int, top_k: int, spread: float = 1.0) -> Routings:
    """Nothing in the routings says what comes, the scores say all; the first layer, which has none, uses the same experts always."""
    logits = spread * np.random.default_rng(0).normal(size=(TOKENS, LAYERS, count))
    logits[:, 0] = np.arange(count)
    experts = np.argsort(-logits, axis=2)[..., :top_k].astype(np.int16)
    scores = {AheadScores.router: softmax(logits[:, 1:]).astype(np.float32)}
    return Routings(experts, np.zeros(TOKENS, int), np.ones(TOKENS, np.bool_), count, scores)


def chances(routings: Routings, policy: ExpertPolicy) -> tuple[np.ndarray, np.ndarray]:
    """[tokens, layers, experts]: what was foreseen, and whether it was used."""
    found, used = np.empty((2, len(routings.experts), routings.layers, routings.count))
    for t, routed in enumerate(routings.experts.tolist()):
        for layer, experts in enumerate(routed):
            found[t, layer] = policy.foresee(layer)
            used[t, layer] = np.isin(np.arange(routings.count), experts)
            policy.observe(layer, experts, routings.scores[AheadScores.router][t, layer] if layer + 1 < routings.layers else None)
    return found, used


def lookahead(routings: Routings) -> ExpertPolicy:
    return make_expert_policy(ExpertPolicyName.lookahead, routings.layers, routings.count, routings.top_k)


@pytest.fixture(scope="module")
def made_up() -> Routings:
    return made_up_routings(Size(prompts=4, prompt_tokens=32, new_tokens=128, layers=8), seed=0)


@pytest.mark.parametrize(("count", "top_k"), SHAPES)
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_scores_that_are_always_right_become_near_certainty_within_some_hundred_visits(count: int, top_k: int, spread: float) -> None:
    routings = foreseen_exactly(count, top_k, spread)
    found, used = chances(routings, lookahead(routings))
    late, coming = found[150:, 1:], used[150:, 1:] == 1
    assert np.quantile(late[coming], 0.05) > 0.9 and late[coming].min() > 0.75
    assert np.quantile(late[~coming], 0.95) < 0.1 and late[~coming].max() < 0.25


@pytest.mark.parametrize(("count", "top_k"), SHAPES)
def test_scores_that_are_always_right_fetch_what_is_missing_and_nothing_else(count: int, top_k: int) -> None:
    (fetched,) = replay(foreseen_exactly(count, top_k), ExpertPolicyName.lookahead, [top_k], Prefetch(top_k, 0.5)).fetched
    assert fetched.right > 0.95 * fetched.fetched
    assert fetched.right > 0.95 * fetched.missed


def test_scores_that_are_noise_leave_what_mix_foresees(made_up: Routings) -> None:
    noise = np.random.default_rng(1).normal(size=made_up.scores[AheadScores.router].shape)
    routings = replace(made_up, scores={AheadScores.router: softmax(1.5 * noise)})
    named = {name: named_and_gained(routings, name) for name in (ExpertPolicyName.lookahead, ExpertPolicyName.mix)}
    (named_by_it, gained), (named_by_mix, gained_by_mix) = named.values()
    assert named_by_it > named_by_mix - 0.02
    assert gained > gained_by_mix - 0.02


def named_and_gained(routings: Routings, name: ExpertPolicyName) -> tuple[float, float]:
    """Shares of all uses, beside 2 slots: named, and fetched rightly less fetched in vain."""
    found: Replay = replay(routings, name, [2], Prefetch(2, 0.5))
    (ahead,) = found.fetched
    return ahead.named / found.kept.uses, (2 * ahead.right - ahead.fetched) / found.kept.uses


def test_scores_that_are_mostly_right_name_far_more_than_mix_and_about_as_much_as_they_do_alone(made_up: Routings) -> None:
    names = [ExpertPolicyName.mix, ExpertPolicyName.lookahead]
    mix, both = (s.named_rate for name in names for s in compare(made_up, names, [2], Prefetch(2)).scores() if s.policy == name)
    decoded = made_up.decode
    likeliest = np.argsort(-made_up.scores[AheadScores.router][decoded], axis=2)[..., :2]
    alone = (likeliest[..., None] == made_up.experts[decoded][:, 1:, None]).any(3).mean()
    alone_but_in_the_first = (alone * (made_up.layers - 1) + mix) / made_up.layers
    assert both > mix + 0.25 and both > alone_but_in_the_first - 0.01


def test_what_lookahead_foresees_are_frequencies(made_up: Routings) -> None:
    found, used = (each[64:].ravel() for each in chances(made_up, lookahead(made_up)))
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.0)):
        within = (low <= found) & (found < high)
        assert used[within].mean() == pytest.approx(found[within].mean(), abs=0.06)


def test_lookahead_keeps_what_mix_keeps(made_up: Routings) -> None:
    ahead, mix = (replay(made_up, name).kept for name in (ExpertPolicyName.lookahead, ExpertPolicyName.mix))
    assert ahead.hits == pytest.approx(mix.hits, rel=1e-3)


def test_the_scale_of_scores_does_not_matter_and_scores_all_alike_say_nothing() -> None:
    found = []
    for scores in (np.array([0.1, 0.5, 0.1, 0.3]), np.array([0.2, 1.0, 0.2, 0.6]), np.zeros(4), np.full(4, 0.25)):
        policy = make_expert_policy(ExpertPolicyName.lookahead, 2, 4, 2)
        policy.observe(0, [0, 1], scores)
        found.append(policy.foresee(1).copy())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    np.testing.assert_array_equal(found[2], found[3])
    assert np.ptp(found[0]) > 0.3 and np.ptp(found[2]) < 1e-6


def test_after_a_prompt_no_scores_of_an_earlier_token_are_left() -> None:
    routings = foreseen_exactly(8, 2)
    policies = lookahead(routings), make_expert_policy(ExpertPolicyName.lookahead, routings.layers, routings.count, routings.top_k)
    for policy, scores in zip(policies, ([0.9, *[0.01] * 7], [*[0.01] * 7, 0.9]), strict=True):
        for _ in range(2):
            policy.observe(0, [0, 1], np.array(scores))
        for layer in range(routings.layers):
            policy.study(layer, routings.experts[:5, layer].astype(np.intp))
    np.testing.assert_array_equal(policies[0].foresee(1), policies[1].foresee(1))
