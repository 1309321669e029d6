"""Waits of visits that miss experts: the mean over how many each misses, by lines that a program can hold."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.experts.expert_misses import ALL_ASKED, visit
from penstock.planner.contract.experts.visit_waits import MISSED_AT, wait_lines
from penstock.planner.contract.given.model import Experts
from tests.planner.small import MB


def mean_wait(waits: tuple[float, ...], odds: float) -> float:
    """Over every way in which a visit's experts may be missed, each by itself."""
    asked, total = len(waits) - 1, 0.0
    for missed in product((False, True), repeat=asked):
        chance = prod(odds if each else 1 - odds for each in missed)
        total += chance * waits[sum(missed)]
    return total


@given(st.integers(1, 6), st.floats(0, 3), st.floats(0, 6), st.floats(0, 1))
def test_lines_touch_the_mean_wait_and_never_exceed_it(asked, copy_s, hides, odds) -> None:
    waits = tuple(max(0.0, copy_s * missed - hides) for missed in range(asked + 1))
    lines = wait_lines(waits)
    for at in (*MISSED_AT, odds):
        largest = max(line.none + line.each * at * asked for line in lines)
        true_s = mean_wait(waits, at)
        assert largest <= true_s + 1e-9
        if at in MISSED_AT:
            assert largest == pytest.approx(true_s, abs=1e-9)
        assert largest >= true_s - 0.02 * asked * copy_s


def test_who_misses_few_waits_for_none() -> None:
    """Eight experts, of which launches hide five: half missed is four on average, and hardly a wait."""
    lines = wait_lines(tuple(max(0.0, missed - 5.0) for missed in range(9)))
    few, all_of_them = (max(line.none + line.each * missed for line in lines) for missed in (4, 8))
    assert all_of_them == pytest.approx(3.0) and 0 < few < 0.3


@pytest.mark.parametrize(
    ("count", "top_k", "tokens"), [(8, 2, 1), (8, 2, 4), (8, 2, 8), (128, 8, 16), (128, 8, 22), (128, 4, 40), (4, 4, 1)]
)
def test_visits_of_nearly_all_experts_are_as_many_as_are_drawn(count: int, top_k: int, tokens: int) -> None:
    experts, draw = Experts(count, top_k, MB, (0,), default_hit_rates(count, top_k)), np.random.default_rng(1)
    chosen = np.argsort(draw.random((2000, tokens, count)), axis=2)[:, :, :top_k].reshape(2000, -1)
    found = np.mean([len(set(one)) >= ALL_ASKED * count for one in chosen])
    assert visit(experts, tokens).all_asked == pytest.approx(found, abs=0.06)
