"""A rank that ends in the middle of what all do waits for nobody: its line would not be told."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.planner.contract.ranks.dealing import Dealing
from penstock.runtime.ranks.rank import Rank


class Played:
    """Company, hops and word to others at once: what was asked, in order."""

    is_lost = is_broken = False

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def let_go(self) -> None:
        self.asked.append("let go")

    def close(self, broken: bool | None = None) -> None:
        self.asked.append("tell" if broken is None else ("close", broken))

    def closed(self) -> None:
        self.asked.append("hear")


def rank(number: int, played: Any) -> Rank:
    leading = None if number else played
    return Rank(number, Dealing.even(2, 2), 300, played, played, leading, _hops=played)


@pytest.mark.parametrize(("number", "asked"), [(0, ["tell", ("close", False), "hear"]), (1, ["let go", ("close", True)])])
def test_an_error_of_a_rank_that_follows_lets_its_hops_go(number: int, asked: list[Any]) -> None:
    played = Played()
    with pytest.raises(KeyError), rank(number, played):
        raise KeyError("a fault of ours")
    assert played.asked == asked


@pytest.mark.parametrize("number", [0, 1])
def test_without_an_error_nothing_is_left_on_its_way(number: int) -> None:
    played = Played()
    with rank(number, played):
        pass
    assert ("close", False) in played.asked and "let go" not in played.asked
