"""Pages in three tiers: what is restored is what was computed, wherever it lay and in whatever order a device works."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.planner.contract.decided.decisions import KvPages
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.disk.page_record import checksum_of
from penstock.runtime.kv.pages.reuse_facts import told
from tests.runtime.kv.batches import SHAPE, TOKENS, Served, served
from tests.runtime.kv.pages import flip
from tests.support import decisions, machine, plan_for, save_tiny, workload

PAGE = SHAPE.payload_bytes
STEM = [(7 * i) % 251 + 1 for i in range(100)]
OTHER = [(11 * i) % 241 + 1 for i in range(100)]


def first(enabled: Sequence[str]) -> str:
    return enabled[0]


def last(enabled: Sequence[str]) -> str:
    return enabled[-1]


def at_random(seed: int) -> Callable[[Sequence[str]], str]:
    return random.Random(seed).choice


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of a model so slow that every page is worth its way."""
    checkpoint = save_tiny(tmp_path_factory.mktemp("tiers"), layers=3)
    made = plan_for(checkpoint, decisions(batch=3), work=workload(prompt_tokens=150))
    return replace(made, hardware=replace(made.hardware, cpu_dense_tflops=1e-6))


@pytest.fixture(scope="module")
def card_plan(plan: Plan) -> Plan:
    slow = replace(machine(True).gpu, dense_tflops=1e-6)
    made = replace(plan.decisions, kv=KvPages(TOKENS, 96, 0, 0))
    return replace(plan, hardware=replace(machine(True), gpu=slow), decisions=made)


def tokens(facts: dict[str, Any], request: int = -1) -> tuple[int, int, int]:
    """Restored from VRAM, DRAM and disk."""
    restored = facts["requests"][request]["restored_tokens"]
    return restored["vram"], restored["dram"], restored["ssd"]


def test_without_a_card_pages_come_from_dram_and_in_a_later_run_from_disk(plan: Plan, tmp_path: Path) -> None:
    with served(plan, tmp_path / "kv") as run:
        assert run.batch([STEM]) == [0]
        assert run.batch([STEM]) == [96]
        facts = run.prefix.facts()
        assert tokens(facts) == (0, 96, 0) and facts["pages_captured"] == 6 == facts["pages_written"]
        assert facts["requests"][1]["restored_bytes"] == {"vram": 0, "dram": 6 * PAGE, "ssd": 0}
        assert facts["requests"][1]["computed_tokens"] == 4 and facts["disk"]["read_hits"] == 0
    with served(plan, tmp_path / "kv") as run:
        assert run.batch([STEM]) == [96]
        facts = run.prefix.facts()
        assert tokens(facts) == (0, 0, 96) and facts["pages_captured"] == 0
        assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (0, 96, 0), "what came from disk stays in DRAM"
        assert run.prefix.facts()["restored_bytes"] == {"vram": 0, "dram": 6 * PAGE, "ssd": 6 * PAGE}


def test_without_a_directory_pages_live_in_memory(plan: Plan) -> None:
    with served(plan) as run:
        assert [run.batch([STEM]), run.batch([STEM])] == [[0], [96]]
        facts = run.prefix.facts()
        assert facts["disk"] is None and facts["pages_written"] == 0 == facts["failures"] and tokens(facts) == (0, 96, 0)


@pytest.mark.parametrize("bounce", [1, 2, 5])
@pytest.mark.parametrize("choose", [first, last])
def test_a_card_restores_from_each_tier(card_plan: Plan, tmp_path: Path, choose: Callable, bounce: int) -> None:
    with served(card_plan, tmp_path / "kv", choose, bounce=bounce) as run:
        assert [run.batch([STEM]), run.batch([STEM])] == [[0], [96]]
        assert tokens(run.prefix.facts()) == (96, 0, 0)
        run.prefix.forget()
        assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (0, 96, 0)
    with served(card_plan, tmp_path / "kv", choose, bounce=bounce) as run:
        assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (0, 0, 96)
        assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (96, 0, 0), "what was brought stays in the pool"


class Copied(TorchDispatchMode):
    """Counts the bytes that torch writes inside."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for tensor in (t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)):
            self.nbytes += 0 if func.is_view else tensor.nbytes
        return out


def test_a_hit_of_4096_tokens_in_vram_copies_no_byte(card_plan: Plan) -> None:
    """Nor does any other sequence of the batch that begins alike; each goes on in a page of its own."""
    stem = [i % 300 for i in range(4096)]
    with served(card_plan, None, first, slots=270, dram=300) as run:
        run.batch([[*stem, 5]])
        run.device.drain()
        sequences = [KvSequence.of(i, [*stem, i, 6, 7]) for i in range(3)]
        with Copied() as copied:
            run.prefix.restore(sequences)
            run.prefix.confirm()
            run.device.drain()
        assert [s.cached for s in sequences] == [4096] * 3 and copied.nbytes == 0
        assert sequences[0].pages == sequences[1].pages == sequences[2].pages and len(sequences[0].pages) == 256
        for sequence in sequences:
            sequence.hold(run.memory.pool, 4099)
        assert len({s.pages[-1] for s in sequences} | set(sequences[0].pages[:-1])) == 256 + 3
        assert run.prefix.facts()["restored_bytes"] == {"vram": 0, "dram": 0, "ssd": 0}
        with Copied() as copied:
            run.prefix.forget()
            for sequence in sequences:
                sequence.release(run.memory.pool)
            run.prefix.restore(sequences[:1])
            run.prefix.confirm()
            run.device.drain()
        assert copied.nbytes >= 256 * PAGE, "what comes from DRAM is counted"
        sequences[0].release(run.memory.pool)


@pytest.mark.parametrize("seed", range(25))
def test_any_order_of_the_devices_work_gives_the_same_kv(card_plan: Plan, tmp_path: Path, seed: int) -> None:
    """Batches of unequal prompts that share beginnings, with few pages everywhere: every row is judged where it is computed with."""
    dice = random.Random(seed)
    directory = tmp_path / "kv" if seed % 2 else None
    room = 3 * 8 + dice.randint(0, 6)
    with served(card_plan, directory, at_random(seed), (), dice.randint(2, 12), dice.randint(1, 5), room) as run:
        for _ in range(6):
            stems = [dice.choice([STEM, OTHER]) for _ in range(dice.randint(1, 3))]
            prompts = [stem[: dice.randint(1, 100)] + [dice.randint(1, 3)] for stem in stems]
            run.batch(prompts, [[5] * 20] * len(prompts), finish=dice.random() < 0.7)
        facts = run.prefix.facts()
        assert facts["failures"] == 0


@pytest.mark.parametrize("choose", [first, last])
def test_pages_that_are_pushed_out_of_vram_go_to_dram(card_plan: Plan, choose: Callable) -> None:
    """DRAM has fewer pages than the pool and forgot the first prompt, whose last page comes back to it when the pool needs the room."""
    with served(card_plan, None, choose, (), dram=4, slots=10) as run:
        push_out(run)
        assert run.batch([STEM[: 5 * TOKENS + 1]]) == [5 * TOKENS]
        assert tokens(run.prefix.facts()) == (4 * TOKENS, TOKENS, 0)


def push_out(run: Served) -> None:
    run.batch([STEM[: 5 * TOKENS + 1]])
    run.batch([OTHER[: 4 * TOKENS + 1]])
    assert run.prefix.facts()["pages_demoted"] == 0
    run.batch([[4] * (TOKENS + 1)])
    assert run.prefix.facts()["pages_demoted"] == 1


def test_pages_of_running_sequences_are_never_pushed_out(card_plan: Plan) -> None:
    with served(card_plan, None, first, slots=7) as run:
        run.batch([STEM[: 3 * TOKENS + 1]])
        held = KvSequence.of(0, STEM[: 3 * TOKENS + 1])
        run.prefix.restore([held])
        run.prefix.confirm()
        assert held.cached == 3 * TOKENS
        run.memory.pool.take(4)
        with pytest.raises(RuntimeError, match="1 pages of KV are wanted, 0 of 7 are free"):
            run.memory.pool.take(1)
        run.memory.pool.release(range(7))


def test_restoring_from_dram_waits_for_no_copy(card_plan: Plan) -> None:
    with served(card_plan, None, first, bounce=2) as run:
        run.batch([STEM])
        run.prefix.forget()
        run.device.drain()
        sequence = KvSequence.of(0, STEM)
        with run.no_waiting():
            run.prefix.restore([sequence])
        run.prefix.confirm()
        assert sequence.cached == 96
        sequence.release(run.memory.pool)


@pytest.mark.parametrize("host_layers", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_layers_in_dram_take_their_part_of_each_page(card_plan: Plan, tmp_path: Path, host_layers: tuple[int, ...], seed: int) -> None:
    settled: list[bool] = []
    for start in ([0, 0, 0], [96, 48, 48]):
        options = {"bounce": 3, "settle": lambda: settled.append(True)}
        with served(card_plan, tmp_path / "kv", at_random(seed), host_layers, **options) as run:
            assert run.batch([STEM, OTHER[:50], STEM[:60]]) == start
            run.prefix.forget()
            assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (0, 96, 0)
            assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (96, 0, 0)
    assert settled


def test_layers_in_dram_leave_the_pool_with_their_page(card_plan: Plan) -> None:
    with served(card_plan, None, at_random(7), (1,), dram=4, slots=10) as run:
        push_out(run)
        assert run.batch([STEM[: 5 * TOKENS + 1]]) == [5 * TOKENS] and run.prefix.facts()["failures"] == 0


@pytest.mark.parametrize("choose", [None, first])
def test_a_page_is_hashed_once_each_time_it_enters_or_leaves_a_tier(
    plan: Plan, card_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choose: Callable | None
) -> None:
    hashed: list[str] = []

    def counting(module: str) -> Callable[[memoryview], int]:
        return lambda payload: hashed.append(module) or checksum_of(payload)

    for module in ("pages.capture", "pages.dram_pages", "disk.page_fetch"):
        monkeypatch.setattr(f"penstock.runtime.kv.{module}.checksum_of", counting(module.partition(".")[2]))
    made = card_plan if choose else plan
    with served(made, tmp_path / "kv", choose) as run:
        run.batch([STEM])
        assert run.prefix.facts()["pages_written"] == 6 and hashed == ["capture"] * 6
    hashed.clear()
    with served(made, tmp_path / "kv", choose) as run:
        assert run.batch([STEM]) == [96] and hashed == ["page_fetch"] * 6
        run.prefix.forget()
        assert run.batch([STEM]) == [96] and hashed == ["page_fetch"] * 6 + ["dram_pages"] * 6


def test_what_came_from_disk_is_checked_when_dram_gives_it(plan: Plan, tmp_path: Path) -> None:
    with served(plan, tmp_path / "kv") as run:
        run.batch([STEM])
    lines: list[str] = []
    with served(plan, tmp_path / "kv", warn=lines.append, readers=1) as run:
        assert run.batch([STEM]) == [96]
        run.memory.view[2 * PAGE + 77] ^= 4
        assert run.batch([STEM]) == [32] and len(lines) == 1 and "checksum" in lines[0]


@pytest.mark.parametrize("choose", [None, first, last])
def test_a_flipped_bit_in_dram_is_found_and_what_follows_is_computed(plan: Plan, card_plan: Plan, choose: Callable | None) -> None:
    """Slots of DRAM are taken in order, so the third page lies in the third one."""
    lines: list[str] = []
    with served(card_plan if choose else plan, None, choose, bounce=4, warn=lines.append) as run:
        run.batch([STEM])
        run.prefix.forget()
        run.memory.view[2 * PAGE + 77] ^= 4
        assert run.batch([STEM, OTHER, STEM[:20], STEM[:60]]) == [32, 0, 16, 32], "each sequence goes back to its own last good page"
        assert run.prefix.facts()["failures"] == 1 == len(lines) and "checksum" in lines[0]
        run.prefix.forget()
        assert run.batch([STEM]) == [96], "it was computed and kept anew"
        assert run.prefix.facts()["failures"] == 1 == len(lines)


@pytest.mark.parametrize(("choose", "host_layers"), [(None, ()), (first, (1,)), (last, (0, 1, 2))])
def test_where_kv_lies_in_dram_nothing_is_computed_before_all_is_checked(
    plan: Plan, card_plan: Plan, choose: Callable | None, host_layers: tuple[int, ...]
) -> None:
    with served(card_plan if choose else plan, None, choose, host_layers, bounce=4, warn=lambda line: None) as run:
        run.batch([STEM])
        run.prefix.forget()
        run.memory.view[2 * PAGE + 77] ^= 4
        sequence = KvSequence.of(0, STEM)
        run.prefix.restore([sequence])
        assert sequence.cached == 32 and len(sequence.pages) == 2
        run.prefix.confirm()
        assert sequence.cached == 32 and run.prefix.facts()["failures"] == 1
        sequence.release(run.memory.pool)


def test_a_bad_page_does_not_stay_in_vram(card_plan: Plan) -> None:
    with served(card_plan, None, first, bounce=4, warn=lambda line: None) as run:
        run.batch([STEM[:33]])
        run.prefix.forget()
        run.memory.view[PAGE + 77] ^= 4
        assert run.batch([STEM[:40]]) == [16]
        assert run.batch([STEM[:40]]) == [32]
        assert run.batch([STEM[:40]]) == [32] and tokens(run.prefix.facts()) == (32, 0, 0)


@pytest.mark.parametrize("choose", [None, at_random(3)])
def test_a_damaged_page_on_disk_and_what_follows_are_computed(plan: Plan, card_plan: Plan, tmp_path: Path, choose: Callable | None) -> None:
    made = card_plan if choose else plan
    with served(made, tmp_path / "kv", choose) as run:
        run.batch([STEM])
    flip(tmp_path / "kv" / "segment-00000000.kv", 2 * (4096 + PAGE) + 4096 + 9)
    with served(made, tmp_path / "kv", choose) as run:
        assert run.batch([STEM]) == [32]
        assert run.prefix.facts()["failures"] == 1
        assert run.batch([STEM]) == [96]


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
