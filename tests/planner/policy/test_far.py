"""Foresight beyond the next layer: what it names, what it has learnt, and what a cache makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.contract.experts.expert_caches import LIKELY
from penstock.planner.contract.experts.policies import FarSight
from penstock.planner.contract.experts.policies.far import SCORES, reach
from penstock.planner.contract.experts.prefetch import Prefetch

LAYERS, COUNT, TOP_K = 6, 8, 2


def scores_of(chosen: list[list[int]]) -> np.ndarray:
    """[layers, experts] that name ``chosen``, the first of each layer above the second."""
    scores = np.zeros((len(chosen), COUNT), np.float32)
    for row, (first, second) in zip(scores, chosen, strict=True):
        row[first], row[second] = 0.7, 0.3
    return scores


def walk(far: FarSight, draw: np.random.Generator, tokens: int, right: int) -> None:
    """Tokens whose routers are always foreseen ``right`` layers ahead and no further, where others are named."""
    for _ in range(tokens):
        used = [draw.choice(COUNT, TOP_K, replace=False).tolist() for _ in range(LAYERS)]
        for layer in range(LAYERS):
            said = [
                used[k] if k - layer <= right else [e for e in range(COUNT) if e not in used[k]][:TOP_K] for k in range(layer + 1, LAYERS)
            ]
            far.observe(layer, used[layer], scores_of(said) if said else None)


def test_chances_are_how_often_names_at_that_distance_were_right() -> None:
    far, draw = FarSight(LAYERS, COUNT, TOP_K), np.random.default_rng(0)
    walk(far, draw, 50, right=3)
    far.observe(0, [0, 1], scores_of([[2, 3], [4, 5], [6, 7], [1, 0], [3, 2]]))
    assert far.named(0, TOP_K) == [(2, 4), (2, 5), (3, 6), (3, 7), (4, 1), (4, 0), (5, 3), (5, 2)]
    chances = {distance: [far.chance(distance, rank) for rank in range(TOP_K)] for distance in range(2, LAYERS)}
    assert all(chance > 0.95 if distance <= 3 else chance < 0.05 for distance in chances for chance in chances[distance])


def test_only_what_is_likely_enough_is_named() -> None:
    far, draw = FarSight(LAYERS, COUNT, TOP_K, least=0.5), np.random.default_rng(0)
    assert far.chance(2, 0) == 0.5
    walk(far, draw, 50, right=3)
    far.observe(0, [0, 1], scores_of([[2, 3], [4, 5], [6, 7], [1, 0], [3, 2]]))
    assert far.named(0, TOP_K) == [(2, 4), (2, 5), (3, 6), (3, 7)]


def test_scores_beyond_the_last_layer_are_refused() -> None:
    far = FarSight(LAYERS, COUNT, TOP_K)
    with pytest.raises(ValueError, match="layer 4"):
        far.observe(4, [0, 1], scores_of([[2, 3], [4, 5]]))


def test_the_next_layer_and_the_next_token_are_not_named() -> None:
    far = FarSight(LAYERS, COUNT, TOP_K)
    far.observe(3, [0, 1], scores_of([[2, 3], [4, 5]]))
    assert far.named(3, 1) == [(5, 4)]
    far.observe(4, [2, 3], scores_of([[4, 5]]))
    far.observe(5, [4, 5], None)
    assert not [*far.named(4, 2), *far.named(5, 2)]


def test_names_of_experts_that_are_held_do_not_count() -> None:
    """The first of two names is always held and always right, the second never."""
    far = FarSight(LAYERS, COUNT, TOP_K)
    far.held[::COUNT] = bytes([1] * LAYERS)
    for _ in range(20):
        for layer in range(LAYERS):
            said = [[0, 1]] * (LAYERS - layer - 1)
            far.observe(layer, [0, 5], scores_of(said) if said else None)
    far.observe(0, [0, 5], scores_of([[1, 0]] * (LAYERS - 1)))
    assert far.chance(2, 0) == 0.5 and far.chance(2, 1) < 0.1
    assert far.named(0, TOP_K) == [(layer, 1) for layer in range(2, LAYERS)]


def test_what_was_named_before_a_prompt_is_void() -> None:
    far = FarSight(LAYERS, COUNT, TOP_K)
    far.observe(0, [0, 1], scores_of([[2, 3]] * (LAYERS - 1)))
    assert list(far.named(0, 1))
    far.forget()
    assert not list(far.named(0, 1))


@pytest.mark.parametrize("layers, count, expected", [(32, 8, 31), (48, 128, 2), (48, 512, 1), (1, 8, 0)])
def test_scores_are_taken_of_as_many_layers_as_are_cheap(layers: int, count: int, expected: int) -> None:
    assert reach(layers, count) == expected and reach(layers, count) * count <= max(SCORES, count)


class Sure:
    """Foresees nothing of the next layer; all experts are worth the same."""

    needs_ahead = None

    def observe(self, layer: int, experts: list[int], ahead: np.ndarray | None = None) -> None: ...

    def study(self, layer: int, routed: np.ndarray) -> None: ...

    def worth(self, layer: int) -> np.ndarray:
        return np.zeros(COUNT)

    def foresee(self, layer: int) -> np.ndarray:
        return np.zeros(COUNT)


def test_a_cache_fetches_for_farther_layers_what_it_has_not_and_has_by_then() -> None:
    far = FarSight(LAYERS, COUNT, TOP_K)
    walk(far, np.random.default_rng(1), 50, right=LAYERS)
    order = [1, 3, 5, 7, 9, 11]
    cache = ExpertCache(dict.fromkeys(order, 1), LAYERS + 3, COUNT, Sure(), None, far, Prefetch(TOP_K, LIKELY))
    for layer in order:
        cache.keep(layer, 4)
    cache.find(1, [0, 1])
    cache.judge(1, Routing(np.array([[0, 1]]), False, scores_of([[2, 3], [4, 5], [6, 7], [4, 0], [3, 2]])))
    coming = cache.coming(1, 2)
    assert next(coming) == (5, 5)
    cache.take(7, 6)
    assert list(coming) == [(7, 7), (9, 0), (11, 3), (11, 2)]
    none = ExpertCache(dict.fromkeys(order, 1), LAYERS + 3, COUNT, Sure(), None, far, Prefetch(0))
    assert not list(none.coming(1, 2))
    assert cache.find(7, [6, 1]).hits == (6,)
