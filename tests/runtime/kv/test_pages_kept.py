"""Which pages stay, which are given up, and what is written to the disk behind a run and at its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.kv.pages.reuse_facts import told
from tests.runtime.kv.batches import TOKENS, served
from tests.runtime.kv.tier_cases import OTHER, STEM, at_random, first, last, tokens


def test_two_pages_of_dram_are_enough_for_any_prefix(card_plan: Plan, tmp_path: Path) -> None:
    with served(card_plan, tmp_path / "kv", at_random(1)) as run:
        run.batch([STEM])
    for choose in (None, at_random(2)):
        with served(card_plan, tmp_path / "kv", choose, dram=2) as run:
            assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (0, 0, 96)


def test_what_a_batch_answered_is_restored_by_the_next_turn(card_plan: Plan) -> None:
    answer = [[9] * 40, [8] * 20]
    with served(card_plan, None, at_random(5)) as run:
        run.batch([STEM[:50], OTHER[:30]], answer)
        assert run.batch([STEM[:50] + answer[0] + [1, 2]]) == [80]
        assert run.batch([OTHER[:30] + answer[1] + [3]]) == [48]


def test_the_beginning_of_a_prefix_stays_longest(plan: Plan) -> None:
    with served(plan, None, dram=12) as run:
        run.batch([STEM])
        run.batch([STEM])
        run.batch([OTHER])
        run.batch([OTHER[:3] + STEM[:40]])
        facts = run.prefix.facts()
        assert facts["failures"] == 0
        assert run.batch([STEM]) == [64], "two pages made room: the last ones of the prefix that was used longest ago"


def test_pages_stay_where_computing_is_faster(plan: Plan, tmp_path: Path) -> None:
    """A slow disk costs what lies there alone."""
    with served(plan, tmp_path / "kv") as run:
        run.batch([STEM])
    with served(plan, tmp_path / "kv", read_gbps=1e-12) as run:
        assert run.batch([STEM[:50]]) == [0]
        assert run.batch([STEM[:49] + OTHER]) == [48], "these three are in DRAM since the batch before"
        assert run.batch([STEM]) == [48]
        facts = run.prefix.facts()
        assert [r["found_tokens"] for r in facts["requests"]] == [48, 48, 96]
        assert [r["declined"] for r in facts["requests"]] == [True, False, True] and facts["declined_requests"] == 2
        assert facts["disk"]["read_hits"] == 0


def test_pages_that_wait_to_be_copied_out_are_lost_when_their_slots_are_wanted(card_plan: Plan) -> None:
    with served(card_plan, None, first, bounce=1, slots=7) as run:
        run.batch([STEM], finish=False)
        run.batch([OTHER], finish=False)
        facts = run.prefix.facts()
        assert facts["pages_captured"] + facts["pages_skipped"] == 12 and facts["pages_skipped"] > 0


def test_what_is_queued_for_the_disk_is_written_before_memory_is_given_back(plan: Plan, tmp_path: Path) -> None:
    with served(plan, tmp_path / "kv") as run:
        run.batch([STEM])
        run.prefix.close()
        run.memory.tensor.zero_()
    with served(plan, tmp_path / "kv") as run:
        assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (0, 0, 96)


def test_beside_a_computing_card_pages_go_one_group_at_a_time_and_the_rest_at_the_end(
    card_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [5.0]
    monkeypatch.setattr("penstock.runtime.kv.pages.capture.time", SimpleNamespace(monotonic=lambda: now[0]))
    with served(card_plan, choose=first, bounce=6) as run:
        run.batch([STEM], finish=False)
        assert run.prefix.pending == 3, "a second group went at once"
        run.device.drain()
        now[0] += 60
        run.prefix.advance()
        assert run.prefix.pending == 0
        run.batch([OTHER])
        assert run.prefix.pending == 0 and run.prefix.facts()["pages_captured"] == 12


def written_slowly(gate: threading.Event) -> Callable[[int, Sequence[memoryview], int], int]:
    def pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
        gate.wait(30)
        return os.pwritev(fd, views, offset)

    return pwritev


@pytest.mark.parametrize("choose", [None, first, last])
def test_a_short_run_writes_all_of_a_prompt_through_two_pages_of_dram(
    plan: Plan, card_plan: Plan, tmp_path: Path, choose: Callable | None
) -> None:
    """Six pages, of which two at a time find room: the rest waits for the disk, not for the next batch."""
    gate = threading.Event()
    with served(plan if choose is None else card_plan, tmp_path / "kv", choose, dram=2, pwritev=written_slowly(gate)) as run:
        run.batch([STEM])
        assert run.prefix.pending == 5
        gate.set()
        seen: list[tuple[int, int]] = []
        run.prefix.flush(lambda done, total: seen.append((done, total)))
        facts = run.prefix.facts()
        assert facts["pages_written"] == 6 == facts["kept_pages"] and facts["pages_skipped"] == 0 == run.prefix.pending
        assert seen[-1][0] == seen[-1][1] > 0
    with served(plan, tmp_path / "kv") as run:
        assert run.batch([STEM]) == [96]


def test_between_batches_the_first_pages_of_a_prompt_go_out_before_their_slots_are_taken(plan: Plan, tmp_path: Path) -> None:
    gate = threading.Event()
    with served(plan, tmp_path / "kv", dram=2, slots=8, pwritev=written_slowly(gate)) as run:
        run.batch([STEM])
        assert run.prefix.crowded
        gate.set()
        run.prefix.drain()
        assert not run.prefix.crowded
        run.batch([OTHER])
        run.prefix.flush()
        facts = run.prefix.facts()
        assert facts["pages_written"] == 12 and facts["not_kept_pages"] == {"slots": 0, "late": 0, "full": 0, "error": 0, "queue": 0}


def test_no_more_pages_are_given_up_than_the_next_batch_takes_and_the_last_go_first(plan: Plan, tmp_path: Path) -> None:
    gate = threading.Event()
    with served(plan, tmp_path / "kv", dram=2, slots=7, pwritev=written_slowly(gate)) as run:
        run.batch([STEM])
        run.batch([OTHER[:60]])
        gate.set()
        run.prefix.flush()
        assert run.prefix.facts()["not_kept_pages"]["slots"] == 2
    with served(plan, tmp_path / "kv") as run:
        assert [run.batch([STEM]), run.batch([OTHER])] == [[64], [48]], "the last pages of the prompt went"


def test_when_the_time_is_over_the_rest_is_not_kept_and_said(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    with served(plan, tmp_path / "kv", dram=2, flush_s=0.0, pwritev=written_slowly(gate)) as run:
        run.batch([STEM])
        threading.Timer(0.05, gate.set).start()
        run.prefix.flush()
        facts = run.prefix.facts()
        written = facts["pages_written"]
        assert written < 6 and facts["not_kept_pages"]["late"] == 6 - written
        said = told(facts | {"requests": []})
        assert said[1].startswith(f"KV kept: {written * TOKENS} tokens") and "kv.flush_s was over" in said[1]


def test_a_flush_that_is_interrupted_ends_and_leaves_sound_pages(plan: Plan, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    gate = threading.Event()
    with served(plan, tmp_path / "kv", dram=2, pwritev=written_slowly(gate)) as run:
        run.batch([STEM])
        gate.set()
        with pytest.raises(KeyboardInterrupt):
            run.prefix.flush(interrupt)
    with served(plan, tmp_path / "kv") as run:
        assert run.batch([STEM])[0] in range(16, 97, TOKENS) and run.prefix.facts()["failures"] == 0


def test_what_was_declined_is_told_with_the_seconds_of_both_ways(plan: Plan, tmp_path: Path) -> None:
    with served(plan, tmp_path / "kv") as run:
        run.batch([STEM])
    with served(plan, tmp_path / "kv", read_gbps=1e-12) as run:
        run.batch([STEM])
        facts = run.prefix.facts()
        assert facts["found_tokens"] == 96 == facts["declined_tokens"]
        (chosen_s, all_s), (line, kept) = facts["declined_s"], told(facts)
        assert chosen_s < all_s and "96 found" in line and "96 declined: with them a prefill is predicted to take" in line
        assert kept == f"KV kept: {6 * TOKENS} tokens (0 pages written, 6 were there)"
