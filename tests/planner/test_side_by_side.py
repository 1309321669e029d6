"""Solves on several cores: in their order, told by whoever asked, and ended where one of them fails."""

from __future__ import annotations

import threading
import time

import pytest

from penstock.planner.explain import side_by_side as module
from penstock.planner.explain.side_by_side import side_by_side


@pytest.fixture(params=[1, 3])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "usable_cores", lambda: request.param)
    return request.param


def test_all_are_solved_in_their_order_and_told_by_the_thread_that_asked(cores: int) -> None:
    told, here = list[bool](), threading.get_ident()

    def solve(number: int) -> int:
        time.sleep(0.01 * (number % 3))
        return number * number

    found = side_by_side(solve, range(7), lambda: told.append(threading.get_ident() == here))
    assert found == [number * number for number in range(7)] and told == [True] * 7
    assert side_by_side(solve, [], lambda: None) == []


def test_what_one_raises_is_raised_and_those_behind_it_are_not_begun(cores: int) -> None:
    begun = list[int]()

    def solve(number: int) -> int:
        begun.append(number)
        time.sleep(0.02)
        if number == 1:
            raise ValueError("no plan")
        return number

    with pytest.raises(ValueError, match="no plan"):
        side_by_side(solve, range(50), lambda: None)
    assert len(begun) < 50 and not [one for one in threading.enumerate() if one.name.startswith("penstock-solves")]
