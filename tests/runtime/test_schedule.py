"""Turns of one conversation never meet in a batch, and everything else keeps its order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.asked.schedule import batches_of, context_tokens


@pytest.mark.parametrize(
    ("conversations", "size", "want"),
    [
        ([None] * 5, 2, [(0, 1), (2, 3), (4,)]),
        (["a", "a", "a"], 4, [(0,), (1,), (2,)]),
        (["a", "a", "b", None], 2, [(0, 2), (1, 3)]),
        (["a", "a", "b", None], 3, [(0, 2, 3), (1,)]),
        (["a", "a", None, None, "a"], 2, [(0, 2), (1, 3), (4,)]),
        (["a", "b", "a", "b"], 1, [(0,), (1,), (2,), (3,)]),
        ([], 3, []),
    ],
)
def test_a_turn_waits_and_others_fill_its_place(conversations: list[str | None], size: int, want: list[tuple[int, ...]]) -> None:
    assert batches_of(conversations, size) == want


@given(st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=30), st.integers(1, 6))
def test_batches_are_those_of_going_through_the_file_again_and_again(conversations: list[str | None], size: int) -> None:
    batches, left = batches_of(conversations, size), list(range(len(conversations)))
    for batch in batches:
        taken, talking = [], set()
        for k in left:
            if len(taken) < size and conversations[k] not in talking:
                taken.append(k)
            talking |= {conversations[k]} - {None}
        assert list(batch) == taken
        left = [k for k in left if k not in taken]
    assert not left and all(len(batch) <= len(batches[0]) for batch in batches)


def test_a_context_is_all_that_was_said_before_and_the_own_prompt() -> None:
    conversations = ["a", None, "b", "a", "a"]
    assert context_tokens(conversations, [5, 6, 7, 8, 9], [10, 20, 30, 40, 50]) == [5, 6, 7, 23, 72]
    assert context_tokens(conversations, [5, 6, 7, 8, 9], [0] * 5) == [5, 6, 7, 13, 22]
