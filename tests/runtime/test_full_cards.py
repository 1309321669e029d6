"""Cards that another process has filled are refused before torch is imported and before a rank is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.company.nvml import free_vram_of
from penstock.runtime.memory import groundwork
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.free_memory import COMES_BACK_S, refuse_full_cards
from penstock.runtime.memory.groundwork import Groundwork
from tests.runtime.ranks.company import dealt_plan
from tests.support import decisions, plan_for


@pytest.fixture
def of_two(checkpoint: Path) -> Plan:
    card = plan_for(checkpoint, decisions(gpu=True), gpu=True).hardware
    return dealt_plan(checkpoint, decisions(gpu=True, pages=8), 2, card=replace(card, devices=(4, 6)))


def needed(plan: Plan, rank: int) -> int:
    budget = Budget.of(plan.of_rank(rank))
    return budget.vram_bytes - budget.guard_bytes


def test_a_full_card_is_named_with_its_rank_what_is_free_and_what_the_plan_takes(of_two: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    need, waited = needed(of_two, 1), []
    with pytest.raises(UserError, match=r"rank 1: the plan takes .* of VRAM and 1.05 MB is free on GPU 6; end the other process or"):
        refuse_full_cards(of_two, {0: 4, 1: 6}, {4: 1 << 40, 6: 1 << 20}.get, waited.append)
    assert sum(waited) == COMES_BACK_S
    refuse_full_cards(of_two, {0: 4, 1: 6}, {4: 1 << 40, 6: need}.get, waited.append)
    refuse_full_cards(of_two, {0: 4, 1: 6}, {}.get, lambda s: pytest.fail("NVML is silent, and was waited for"))


def test_vram_of_a_process_that_has_just_ended_is_waited_for(of_two: Plan) -> None:
    free = iter([0, 0, 1 << 40])
    refuse_full_cards(of_two, {1: 6}, lambda card: next(free), lambda s: None)


def test_a_process_that_has_a_context_of_its_own_leaves_its_card_to_cuda(of_two: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    refuse_full_cards(of_two, {0: 4}, {4: 0}.get, lambda s: None)
    with pytest.raises(UserError, match="rank 1"):
        refuse_full_cards(of_two, {0: 4, 1: 6}, {4: 0, 6: 0}.get, lambda s: None)


def test_ranks_are_started_on_none_of_a_plans_cards_once_one_is_full(of_two: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(groundwork, "check_cards", lambda plan: None)
    monkeypatch.setattr(groundwork, "refuse_full_cards", lambda plan, cards: asked.append(cards))
    Groundwork.of(of_two)
    assert asked == [{0: 4, 1: 6}]


class Driver:
    """``pynvml`` with these cards: name, free bytes; ``divided`` is one of which CUDA shows parts."""

    class NVMLError(Exception):
        pass

    def __init__(self, *cards: tuple[str, int], divided: int = -1):
        self._cards, self._divided = cards, divided
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if not uuid.removeprefix("GPU-").isdigit():
            raise self.NVMLError(uuid)
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, card: int) -> str:
        return self._cards[card][0]

    def nvmlDeviceGetMemoryInfo(self, card: int) -> SimpleNamespace:
        return SimpleNamespace(free=self._cards[card][1])

    def nvmlDeviceGetMigMode(self, card: int) -> tuple[int, int]:
        if self._divided < 0:
            raise self.NVMLError("not supported")
        return int(card == self._divided), 0


@pytest.mark.parametrize(
    ("visible", "order", "cards", "divided", "found"),
    [
        (None, None, (("H", 5), ("H", 7)), -1, [5, 7, None]),
        ("1,0", None, (("H", 5), ("H", 7)), -1, [7, 5, None]),
        ("GPU-1,GPU-abc", None, (("H", 5), ("A", 7)), -1, [7, None, None]),
        (None, None, (("H", 5), ("A", 7)), -1, [None, None, None]),  # CUDA has the fastest one first
        (None, "PCI_BUS_ID", (("H", 5), ("A", 7)), -1, [5, 7, None]),
        (None, None, (("H", 5), ("H", 7)), 1, [5, None, None]),
        ("", None, (), -1, [None, None, None]),
    ],
)
def test_free_vram_is_that_of_the_card_which_cuda_shows_under_that_number(
    visible: str | None, order: str | None, cards: tuple[tuple[str, int], ...], divided: int, found: list[int | None], monkeypatch
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    driver = Driver(*cards, divided=divided)
    assert [free_vram_of(number, driver) for number in range(3)] == found and driver.open == 0
