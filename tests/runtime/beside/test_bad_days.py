"""The CPU's units on a bad day: an interrupt while both sides work, threads that lose their cores, a CPU with less than the plan's."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.beside.host_library import products_unbuilt
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.model.binding import WeightStream
from penstock.runtime.model.rows import Row, RowKind, Step
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.recorded.card_pass import CardPass
from penstock.runtime.recorded.graph_steps import GraphSteps
from penstock.runtime.recorded.host_steps import HostSteps, host_unit
from penstock.runtime.recorded.recorded_stream import RecordedStream
from penstock.runtime.recorded.tabled_rows import TabledStepper
from tests.runtime.beside.test_host_serve import HIDDEN, ROWS, Asking, normal
from tests.runtime.captures import Capturing
from tests.runtime.test_host_steps import Gated, PlayedWords
from tests.support import HostCopier

pytestmark = pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler here")
UNITS, HANGS_S = 4, 20.0


class CardThread(Capturing, PlayedWords):
    """A card that writes and waits for words in a thread of its own, launch after launch. ``busy`` holds it up behind the first unit.
    Whoever waits for its results next is interrupted after ``alarm_s``, where that is not 0."""

    def __init__(self) -> None:
        self.acts: list[Callable[[], None]] = []
        self.busy, self.begun, self.over = threading.Event(), threading.Event(), threading.Event()
        self.over.set()
        self.alarm_s = 0.0

    def write_word(self, address: int, value: int) -> None:
        self._act(lambda: PlayedWords.write_word(self, address, value))

    def wait_word(self, address: int, value: int) -> None:
        self._act(lambda: PlayedWords.wait_word(self, address, value))

    def _act(self, what: Callable[[], None]) -> None:
        assert self.captures
        self.acts.append(what)

    def launch(self) -> None:
        self.over.clear()
        threading.Thread(target=self._run).start()

    def _run(self) -> None:
        for number, act in enumerate(self.acts):
            if number == len(self.acts) // UNITS:
                self.begun.set()
                assert self.busy.wait(HANGS_S)
            act()
        self.over.set()

    def wait_results(self) -> None:
        alarm_s, self.alarm_s = self.alarm_s, 0.0
        if alarm_s:
            signal.setitimer(signal.ITIMER_REAL, alarm_s)
        while not self.over.is_set():  # Python 3.11 takes a thread for ended that is asked whether it lives while an interrupt comes
            time.sleep(0.001)

    def wait(self) -> None:
        self.busy.set()
        assert self.over.wait(HANGS_S), "the card waits for the CPU for ever"

    def close(self) -> None:
        self.wait()


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a card pins nothing."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **more: zeros(*a, **more))


@pytest.mark.parametrize("in_turn", [False, True])
def test_an_interrupt_while_card_and_cpu_compute_ends_both(unlocked: None, in_turn: bool) -> None:
    """It comes where the host waits for the step, and a thread looks for the next unit. Closing lets the card ask for the rest of the step,
    and the CPU answers."""
    modules = [Gated() for _ in range(UNITS)]
    units = [
        host_unit(Unit("ffn", i), "mlp", module, {f"mlp.{name}": p.detach() for name, p in module.named_parameters()}, "silu")
        for i, module in enumerate(modules)
    ]
    card, ledger = CardThread(), Ledger()
    stream = RecordedStream((), {}, card, ledger)

    def compute(step: Step, tables: object, numbers: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(1, 1, 32, dtype=torch.bfloat16)
        for number, module in enumerate(cast(list[nn.Module], modules)):
            feeding[-1].enter(Unit("attn", number))
            hidden = module(hidden)
        return hidden[0]

    stepper = SimpleNamespace(device=torch.device("cpu"), pool=SimpleNamespace(page_tokens=4), put=torch.tensor, compute_tabled=compute)
    step = Step((Row(0, (5,), 0, (0,), RowKind.decode),))
    with HostPool(2) as pool:
        host, feeding = HostSteps(pool, units, 1, HostCopier(), ledger, in_turn), list[WeightStream]()
        fed_by = cast(Any, lambda weights: nullcontext(feeding.append(weights)))
        steps = GraphSteps(cast(TabledStepper, stepper), cast(CardPass, card), stream, stream, fed_by, None, host)
        steps.capture(step)
        assert steps.refused is None and steps.serves(step)
        assert len(card.acts) == UNITS * (3 + in_turn), "words of a unit"
        steps.run(step)
        assert card.begun.wait(HANGS_S)
        before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        card.alarm_s = 0.02
        try:
            with pytest.raises(KeyboardInterrupt):
                steps.run(step)
        finally:
            signal.signal(signal.SIGALRM, before)
        steps.stop()
        assert pool.told().bytes == sum(unit.ffn.bytes for unit in units), "the whole step was answered"
        steps.stop()
        out = torch.empty(1, 32, dtype=torch.bfloat16)
        pool.ffn(units[0].ffn, torch.ones(1, 32, dtype=torch.bfloat16), out)
    assert not any("forward" in vars(module) for module in modules)


def test_threads_whose_cores_go_offline_in_the_middle_of_a_step_go_on() -> None:
    """The kernel moves them to a core that is left, where they take turns."""
    with HostPool(3) as pool:
        asking = Asking(pool)
        x = normal(ROWS, HIDDEN)
        want = [asking.expected(number, x) for number in range(3)]
        left = min(os.sched_getaffinity(0))
        with asking.serve as serve:
            for moved in (False, True):
                serve.begin_step()
                got = [asking.asked(0, x)]
                if not moved:
                    for task in threads_of("penstock-beside"):
                        os.sched_setaffinity(task, {left})
                got += [asking.asked(number, x) for number in (1, 2)]
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def threads_of(name: str) -> list[int]:
    """Numbers of this process's threads of that name."""
    found = [int(path.parent.name) for path in Path("/proc/self/task").glob("*/comm") if path.read_text().strip() == name]
    assert found
    return found


@pytest.mark.parametrize("said", ["default", "avx2"])
def test_a_step_of_a_cpu_without_avx512_says_the_same_but_for_rounding(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(ROWS, HIDDEN)
    torch.manual_seed(3)
    with HostPool(2) as pool:
        asking = Asking(pool)
        want = [asking.expected(number, x).float() for number in range(3)]
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", said)
    with HostPool(2) as pool:
        torch.manual_seed(3)
        asking = Asking(pool)
        with asking.serve as serve:
            serve.begin_step()
            for number in range(3):
                got = asking.asked(number, x).float()
                assert torch.allclose(got, want[number], atol=2**-7 * want[number].abs().max().item(), rtol=0)
