"""A card that fails under a rank: the watchdog hears at once, in one line, whatever that rank's other threads do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.planner.common.errors import UserError
from penstock.runtime.company.company import OF_CARD_S, WHY_S, Company, Seat
from penstock.runtime.led import open_led, rank_process
from penstock.runtime.memory import cuda
from penstock.runtime.ranks.opening import Opening
from tests.runtime.ranks.company import dealt_plan
from tests.support import decisions, plan_for

LAUNCH = torch.AcceleratorError("CUDA error: unspecified launch failure\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")


class Heart:
    """``company.heart.Heart`` of a rank whose watchdog says ``found``."""

    lost = None

    def __init__(self, found: str | None = None):
        self._found = found
        self.waited_s = 0.0
        self.told: list[tuple[int, str]] = []

    def why(self, seconds: float) -> str | None:
        self.waited_s += seconds
        return self._found

    def failed(self, status: int, line: str) -> None:
        self.told.append((status, line))


class Ended(BaseException):
    """The process, by ``os._exit``."""


def company(heart: Heart) -> Company:
    return Company(Seat(1, 2), heart)  # type: ignore[arg-type]


@pytest.fixture
def followed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls what it is given with whatever ends rank 1, which follows a plan with cards: torch knows none here."""
    card = plan_for(checkpoint, decisions(gpu=True), gpu=True).hardware
    plan = dealt_plan(checkpoint, decisions(gpu=True, pages=8), 2, card=card)
    monkeypatch.setattr(open_led, "accept", lambda *asked: Opening(plan, checkpoint, {}, None))
    monkeypatch.setattr(Company, "join", lambda company: None)

    def follow(failed: Callable[[BaseException], None]) -> None:
        with pytest.raises(UserError):
            open_led.follow_one(company(Heart()), {}, None, failed)

    return follow


def test_a_card_that_is_full_is_told_from_the_thread_that_opens_it(followed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory\nSearch for")

    monkeypatch.setattr(cuda, "find_device", lambda budget, number=0: torch.device("cuda", 0))
    monkeypatch.setattr(cuda, "free_vram_of", lambda number: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    told: list[tuple[str, BaseException]] = []
    followed(lambda error: told.append((threading.current_thread().name, error)))
    ((thread, error),) = told
    assert thread == "penstock-card" and "GPU 0 refuses this process a context (CUDA error: out of memory)" in str(error)


def test_a_card_that_fails_in_a_pass_is_told_before_anything_is_given_back(followed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(company: Company, led: object) -> None:
        raise LAUNCH

    class Session:
        """Whose end says when it came."""

        def __init__(self, plan: Any, *others: Any):
            self.own = plan.of_rank(1)

        def __enter__(self) -> Session:
            return self

        def __exit__(self, kind: object, error: BaseException, trace: object) -> None:
            order.append("given back")

    order: list[str] = []
    monkeypatch.setattr(cuda, "find_device", lambda budget, number=0: torch.device("cpu"))
    monkeypatch.setattr(cuda, "open_cuda", lambda budget, device: None)
    monkeypatch.setattr(open_led, "open_session", Session)
    monkeypatch.setattr(open_led, "LedSession", lambda session: session)
    monkeypatch.setattr(open_led, "follow", failing)
    followed(lambda error: order.append(f"{type(error).__name__} told"))
    assert order == ["CardFailed told", "given back"]


@pytest.mark.parametrize(
    ("error", "said"), [(LAUNCH, "the card failed ("), (torch.OutOfMemoryError("CUDA out of memory."), "VRAM ran out (")]
)
def test_a_rank_ends_with_one_line_for_whatever_its_card_raises(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def ended(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(rank_process.os, "_exit", ended)
    heart = Heart()
    with pytest.raises(Ended, match="2"):
        rank_process._fail(company(heart), error)
    ((status, line),) = heart.told
    assert status == 2 and line.startswith(said) and capfd.readouterr().err == ""


def test_a_cards_error_is_another_ranks_where_the_watchdog_says_so_within_a_moment() -> None:
    """A card whose neighbour is gone may fail by itself; NCCL says of a full one that a call failed."""
    nccl = RuntimeError("NCCL error in: a.cpp\nncclUnhandledCudaError: Call failed.\nLast error:\nCuda failure 2 'out of memory'")
    for error in (LAUNCH, nccl):
        alone, beside = Heart(), Heart("rank 2 was killed")
        with pytest.raises(RuntimeError) as raised, company(alone).noticing():
            raise error
        assert raised.value is error and alone.waited_s == OF_CARD_S < WHY_S
        with pytest.raises(UserError, match="rank 2 was killed"), company(beside).noticing():
            raise error
