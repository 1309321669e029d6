"""Pages are checked where they enter or leave a tier, and what is damaged is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.disk.page_record import checksum_of
from penstock.runtime.kv.pages.card_pages import CardPages
from tests.runtime.kv.batches import served
from tests.runtime.kv.pages import flip
from tests.runtime.kv.tier_cases import OTHER, PAGE, STEM, at_random, first, last, tokens


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


def test_a_card_has_been_given_all_copies_before_a_check_begins(card_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that check take the interpreter's lock from the one that queues copies, which the link waits for."""
    order: list[str] = []
    with served(card_plan, None, first, bounce=2) as run:
        run.batch([STEM])
        run.prefix.forget()
        bring, submit = CardPages.bring, run.prefix._aside.submit
        monkeypatch.setattr(CardPages, "bring", lambda *given: order.append("copy") or bring(*given))
        monkeypatch.setattr(run.prefix._aside, "submit", lambda *given: order.append("check") or submit(*given))
        assert run.batch([STEM]) == [96] and order[:7] == [*["copy"] * 6, "check"]


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
