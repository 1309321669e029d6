"""Which missed experts are computed where they lie: both sides end together, nobody waits longer than for copies alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.contract.experts.host_split import HostSplit

seconds = st.floats(1e-4, 1e-2)
splits = st.builds(
    lambda copy, host, hop, b, link, asked: HostSplit(copy, tuple(host * (1 + 0.2 * n) for n in range(4)), hop, b, link, asked),
    seconds, seconds, st.floats(0, 1e-3), st.floats(0.5, 1), st.floats(0.5, 1), st.just(0.0) | st.floats(1e-5, 1e-3),
)  # fmt: skip


@given(splits, st.lists(st.integers(1, 6), max_size=6), st.floats(0, 1e-2))
def test_no_other_share_ends_earlier(split: HostSplit, rows: list[int], queue_s: float) -> None:
    taken = split.on_host(rows, queue_s)
    best = split.lasts([rows[at] for at in taken], len(rows) - len(taken), queue_s)
    for k in range(len(rows) + 1):
        for other in combinations(range(len(rows)), k):
            if all(rows[at] <= len(split.host_s) for at in other):
                assert best <= split.lasts([rows[at] for at in other], len(rows) - k, queue_s) * (1 + 1e-9)
    assert all(rows[at] <= len(split.host_s) for at in taken), "an expert with more rows than were timed is copied"


@given(splits, st.integers(1, 6), seconds)
def test_the_more_the_link_has_queued_the_more_the_cpu_takes(split: HostSplit, missed: int, queue_s: float) -> None:
    """Where neither side slows the other one; else the CPU, slowed for longer, may take one less. Nobody waits for less."""
    apart = replace(split, host_beside=1.0, link_beside=1.0)
    assert len(apart.on_host([1] * missed)) <= len(apart.on_host([1] * missed, queue_s))
    ends = [split.lasts([1] * (k := len(split.on_host([1] * missed, queued))), missed - k, queued) for queued in (0.0, queue_s)]
    assert ends[0] <= ends[1] * (1 + 1e-9)


def test_equal_sides_share_evenly_and_a_slow_cpu_takes_nothing() -> None:
    assert HostSplit(1.0, (1.0,), 0.0).on_host([1, 1, 1, 1]) == (2, 3), "the link brings what was named first"
    assert HostSplit(1.0, (9.0,), 0.0).on_host([1, 1, 1, 1]) == ()
    assert HostSplit(1.0, (0.5, 0.6), 0.0).on_host([2, 1, 1]) == (1, 2), "those with the fewest rows"
    assert HostSplit(1.0, (1.0,), 0.0).on_host([1], queue_s=0.5) == (0,)


@given(splits, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.floats(0, 1e-2))
def test_each_side_is_slower_until_the_other_one_ends(split: HostSplit, rows: list[int], copied: int, queue_s: float) -> None:
    ends = split.ends(rows, copied, queue_s)
    alone_s, copies_s = sum(split.host_s[n - 1] for n in rows), queue_s + copied * split.copy_s
    host_s, link_s = ends[0] - split.hop_s - split.asked_s, ends[1] - max(0.0, len(rows) * split.asked_s - queue_s)
    first = min(host_s, link_s)
    assert min(1, split.host_beside) * first + max(0.0, host_s - first) == pytest.approx(alone_s)
    assert min(1, split.link_beside) * first + max(0.0, link_s - first) == pytest.approx(copies_s)
    assert split.lasts(rows, copied, queue_s) == max(ends)


def test_no_copy_begins_before_the_cpu_is_asked_for_all_that_it_takes() -> None:
    split = HostSplit(1.0, (1.0,), 0.125, asked_s=0.25)
    assert split.ends([1, 1], 2) == (2.375, 2.5), "it begins with the first while it is asked for the second"
    assert split.ends([1, 1], 2, queue_s=0.5) == (2.375, 2.5), "what the link has queued goes on meanwhile"
    assert split.ends([], 2) == (0.0, 2.0) and split.ends([1], 0) == (1.375, 0.0)
    assert replace(split, asked_s=1.0).on_host([1, 1]) == (), "where asking takes as long as a copy, the link brings all"
