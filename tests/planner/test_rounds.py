"""Passes that are all alike: whatever is computed with lies in its slot by then, and what a pass leaves is what the next begins with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.contract.policy.rounds import Rounds


@given(st.lists(st.sampled_from("af"), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 5))
def test_each_unit_lies_in_its_slot_when_its_turn_comes(classes: list[str], a: int, f: int) -> None:
    rounds = Rounds(classes, {"a": a, "f": f})
    lies = {rounds.place(i): i for i in rounds.first}
    for _ in range(3):
        for i in range(len(classes)):
            assert lies[rounds.place(i)] == i
            coming = rounds.behind(i)
            assert rounds.place(coming) == rounds.place(i)
            lies[rounds.place(i)] = coming
        assert lies == {rounds.place(i): i for i in rounds.first}


@given(st.lists(st.sampled_from("af"), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 5))
def test_a_pass_brings_each_unit_once(classes: list[str], a: int, f: int) -> None:
    rounds = Rounds(classes, {"a": a, "f": f})
    assert sorted(map(rounds.behind, range(len(classes)))) == list(range(len(classes)))
