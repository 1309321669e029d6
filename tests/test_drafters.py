"""Which texts the comparison of drafters measures, which calibrate, and which are left out."""

from __future__ import annotations

import pytest

from bench.drafters import LEAST, TEXTS, dealt, edited
from bench.replies import Replies, repeats


def test_a_text_repeats_itself_where_eight_tokens_occur_a_fourth_time() -> None:
    line = list(range(8))
    assert not repeats([*line, 9, *line, 10, *line, 11])
    assert repeats([*line, 9, *line, 10, *line, 11, *line])
    assert not repeats(line[:7] * 1)


@pytest.mark.parametrize(
    "texts, shown, others", [(0, 0, 0), (3, 3, 0), (LEAST, LEAST, 0), (LEAST + 2, LEAST, 2), (31, 16, 15), (3 * TEXTS, TEXTS, TEXTS)]
)
def test_every_second_text_calibrates_where_there_are_enough_and_none_is_measured_too(texts: int, shown: int, others: int) -> None:
    one, other = dealt(range(texts))
    assert (len(one), len(other)) == (shown, others)
    assert not set(one) & set(other)


def test_the_edit_changes_one_name_everywhere() -> None:
    assert edited("total = total + other_total") == "renamed = renamed + other_total"


def test_what_replies_gave_together_is_their_tokens_over_their_seconds() -> None:
    both = Replies([1.0, 3.0], [[1] * 10, [1] * 10], [{"kept": 2}, {"kept": 5}])
    assert both.tokens_per_s == 5.0
    assert both.counted("kept") == 7.0
    assert both.only([1]).counted("kept") == 5.0
