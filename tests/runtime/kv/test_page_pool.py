"""The pool's pages: who holds them, which are adjacent, and which rows one view can show."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.runtime.kv.attention.row_groups import Loose, Rect, groups_of
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.batch.page_pool import PagePool
from penstock.runtime.kv.batch.page_spans import runs, spans
from penstock.runtime.model.rows import Row, RowKind, Step

PAGE = 4
SLOTS = 12


class Pages(RuleBasedStateMachine):
    """Takes, shares and releases in any order; ``held`` are the references that a model of it has."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.held, self.kept = PagePool(SLOTS, PAGE), [0] * SLOTS, [0] * SLOTS

    @rule(count=st.integers(0, SLOTS + 1))
    def take(self, count: int) -> None:
        if count > self.held.count(0):
            with pytest.raises(RuntimeError, match=f"{count} pages of KV are wanted, {self.held.count(0)} of {SLOTS} are free"):
                self.pool.take(count)
            return
        hole = max((n for first, n in runs([p for p in range(SLOTS) if not self.held[p]])), default=0)
        pages = self.pool.take(count)
        assert len(set(pages)) == count and not any(self.held[page] for page in pages)
        assert count == 0 or count > hole or list(runs(pages)) == [(pages[0], count)], "a hole would have held them all"
        for page in pages:
            self.held[page] = 1

    @rule(page=st.integers(0, SLOTS - 1))
    def share(self, page: int) -> None:
        if self.held[page]:
            self.pool.share([page])
            self.held[page] += 1
        else:
            with pytest.raises(RuntimeError, match=f"page {page} of KV is free"):
                self.pool.share([page])

    @rule(page=st.integers(0, SLOTS - 1))
    def release(self, page: int) -> None:
        if self.held[page] > self.kept[page]:
            self.pool.release([page])
            self.held[page] -= 1
        else:
            with pytest.raises(RuntimeError, match=f"page {page} of KV was released twice"):
                self.pool.release([page])

    @rule(page=st.integers(0, SLOTS - 1))
    def keep(self, page: int) -> None:
        if self.held[page]:
            self.pool.keep([page])
            self.held[page] += 1
            self.kept[page] += 1
        else:
            with pytest.raises(RuntimeError, match=f"page {page} of KV is free"):
                self.pool.keep([page])

    @rule(page=st.integers(0, SLOTS - 1))
    def let_go(self, page: int) -> None:
        if self.kept[page]:
            self.pool.let_go([page])
            self.held[page] -= 1
            self.kept[page] -= 1
        else:
            with pytest.raises(RuntimeError, match=f"page {page} of KV is not kept"):
                self.pool.let_go([page])

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.available == sum(held == kept for held, kept in zip(self.held, self.kept, strict=True))
        assert [self.pool.references(page) for page in range(SLOTS)] == self.held
        assert self.pool.free == self.held.count(0)


test_pages_are_free_when_nobody_holds_them = Pages.TestCase


def test_a_sequence_grows_into_the_pages_behind_its_own() -> None:
    pool = PagePool(SLOTS, PAGE)
    first, second = KvSequence.of(0, [1] * 5), KvSequence.of(1, [2])
    first.hold(pool, 5)
    first.hold(pool, 9)
    second.hold(pool, 1)
    assert list(first.pages) == [0, 1, 2] and list(second.pages) == [3]
    first.hold(pool, 13)
    assert list(first.pages) == [0, 1, 2, 4]
    first.release(pool)
    second.release(pool)
    assert pool.free == SLOTS and (first.left, second.left) == (5, 1)


def test_who_keeps_pages_is_asked_for_those_that_are_missing() -> None:
    pool, kept = PagePool(4, PAGE), []
    kept += pool.take(3)
    asked = []

    def release(missing: int) -> None:
        asked.append(missing)
        pool.release(kept[:missing])

    pool.on_short = release
    assert len(pool.take(3)) == 3 and asked == [2]


tables = st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True)


@given(pages=tables, ends=st.tuples(st.integers(0, 32), st.integers(0, 32)), token_bytes=st.integers(1, 3))
def test_spans_are_the_bytes_of_the_tokens_and_no_others(pages: list[int], ends: tuple[int, int], token_bytes: int) -> None:
    first, end = sorted(min(e, len(pages) * PAGE) for e in ends)
    want = [pages[t // PAGE] * PAGE + t % PAGE for t in range(first, end)]
    found = spans(pages, first, end, PAGE, token_bytes)
    assert [b for begin, over in found for b in range(begin, over)] == [t * token_bytes + k for t in want for k in range(token_bytes)]
    assert all(one[1] != other[0] for one, other in zip(found, found[1:], strict=False)), "neighbours are not one"


rows = st.tuples(
    st.integers(1, 5), st.integers(0, 9), st.sampled_from([(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15), (3, 9, 1, 7)])
)


@settings(max_examples=300)
@given(st.lists(rows, min_size=1, max_size=6))
def test_groups_show_every_rows_own_tokens(drawn: list[tuple[int, int, tuple[int, ...]]]) -> None:
    step = Step(tuple(Row(k, (0,) * count, start, pages, RowKind.prompt) for k, (count, start, pages) in enumerate(drawn)))
    shown, first = [], 0
    for group in groups_of(step, PAGE):
        assert group.first == first, "groups are in the rows' order"
        if isinstance(group, Loose):
            needed = group.row.pages[: -(-group.row.end // PAGE)]
            assert len(list(runs(needed))) > 1
            shown.append([needed[t // PAGE] * PAGE + t % PAGE for t in range(group.row.end)])
            first += len(group.row.tokens)
        else:
            shown += [[group.base + k * group.stride + t for t in range(group.end)] for k in range(group.rows)]
            first += group.rows * group.tokens
    assert shown == [[row.pages[t // PAGE] * PAGE + t % PAGE for t in range(row.end)] for row in step.rows]


def test_equal_rows_at_equal_distances_are_one_group() -> None:
    def step(*bases: int) -> Step:
        return Step(tuple(Row(k, (0,), 7, (base, base + 1, base + 2), RowKind.decode) for k, base in enumerate(bases)))

    assert groups_of(step(0, 3, 6, 9), PAGE) == [Rect(0, 4, 1, 7, 0, 12)]
    assert groups_of(step(0, 3, 9), PAGE) == [Rect(0, 2, 1, 7, 0, 12), Rect(2, 1, 1, 7, 36, 0)]
    assert [group.rows for group in groups_of(step(9, 6, 3), PAGE)] == [1, 1, 1], "a view cannot go backwards"
