"""What a stream of KV brings and takes back: the spans of living rows."""

from __future__ import annotations

import random

import pytest

from penstock.runtime.kv.outside.living_rows import LivingRows, united
from penstock.runtime.model.rows import Row, RowKind, Step

TOKENS, BYTES = 4, 10
WINDOWS = {0: None, 1: 3}


def row(sequence: int, start: int, count: int, pages: tuple[int, ...]) -> Row:
    return Row(sequence, (1,) * count, start, pages, RowKind.prompt)


def tokens_of(spans: tuple[tuple[int, int], ...]) -> set[int]:
    """Tokens of the pool; spans are whole tokens, ascending and apart."""
    assert all(a < b < c for (a, b), (c, _) in zip(spans, spans[1:], strict=False)) and all(x % BYTES == 0 for span in spans for x in span)
    return {t for begin, end in spans for t in range(begin // BYTES, end // BYTES)}


def at(pages: tuple[int, ...], tokens: range) -> set[int]:
    return {pages[t // TOKENS] * TOKENS + t % TOKENS for t in tokens}


def test_a_pass_brings_what_came_before_it_and_takes_back_what_is_new() -> None:
    living = LivingRows(TOKENS, WINDOWS)
    assert not living.follow(Step((row(0, 0, 6, (2, 0)), row(1, 0, 3, (1,))))), "nothing was wanted before"
    assert living.wanted(0, BYTES) == ()
    living.compute()
    assert tokens_of(living.new(BYTES)) == at((2, 0), range(6)) | at((1,), range(3)) == tokens_of(living.wanted(0, BYTES))
    assert tokens_of(living.wanted(1, BYTES)) == at((2, 0), range(4, 6)) | at((1,), range(1, 3)), "a window sees two tokens and the next"
    assert living.follow(Step((row(0, 6, 1, (2, 0)),)))
    living.compute()
    assert tokens_of(living.new(BYTES)) == {2}
    assert tokens_of(living.wanted(0, BYTES)) == at((2, 0), range(7)) | at((1,), range(3)), "a sequence that waits is brought as well"


@pytest.mark.parametrize(
    ("step", "known"),
    [
        (Step((row(0, 6, 1, (2, 0)), row(5, 0, 4, (3,)))), True),
        (Step((row(0, 4, 1, (2, 0)),)), True),
        (Step((row(0, 6, 4, (2, 0, 7)),)), True),
        (Step((row(0, 6, 1, (2, 3)),)), False),
        (Step((row(5, 4, 1, (2, 3)),)), False),
        (Step((row(0, 7, 1, (2, 0)),)), False),
    ],
    ids=["a new one joins", "drafts were refused", "it grows", "other pages", "its beginning was restored", "a step is missing"],
)
def test_rows_follow_that_read_only_what_was_brought(step: Step, known: bool) -> None:
    living = LivingRows(TOKENS, WINDOWS)
    living.follow(Step((row(0, 0, 6, (2, 0)),)))
    living.compute()
    assert living.follow(step) is known


def test_once_all_have_ended_a_stream_begins_anew() -> None:
    living = LivingRows(TOKENS, WINDOWS)
    living.follow(Step((row(0, 0, 6, (2, 0)),)))
    living.compute()
    living.forget(0)
    assert living.wanted(0, BYTES) == () and not living.follow(Step((row(0, 0, 2, (1,)),)))


def test_pages_that_sequences_share_are_brought_once() -> None:
    living = LivingRows(TOKENS, WINDOWS)
    living.follow(Step((row(0, 8, 1, (2, 3, 4)), row(1, 8, 2, (2, 3, 5)))))
    assert living.wanted(0, BYTES) == ((2 * TOKENS * BYTES, 4 * TOKENS * BYTES),)


@pytest.mark.parametrize("seed", range(20))
def test_united_parts_cover_what_they_covered(seed: int) -> None:
    dice = random.Random(seed)
    parts = [(begin, begin + dice.randint(1, 5)) for begin in (dice.randint(0, 40) for _ in range(dice.randint(0, 12)))]
    got = united(parts)
    assert {x for a, b in got for x in range(a, b)} == {x for a, b in parts for x in range(a, b)}
    assert all(b < c for (_, b), (c, _) in zip(got, got[1:], strict=False))
