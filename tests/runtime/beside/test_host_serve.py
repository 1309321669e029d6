"""Units of a recorded step are done in their order, as their flags are set."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.runtime.beside.host_ffn import HostFfn, host_linear
from penstock.runtime.beside.host_library import products_unbuilt
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.beside.host_serve import HostServe, flags
from tests.cli import HANGS_S as CLI_HANGS_S
from tests.cli import ROOT
from tests.runtime.beside.test_host_products import matrix_of, normal

pytestmark = pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler here")
HIDDEN, MIDDLE, VOCABULARY, ROWS = 64, 96, 200, 4
HANGS_S = 20.0


@pytest.fixture(scope="module")
def pool() -> Iterator[HostPool]:
    with HostPool(3) as made:
        yield made


class Asking:
    """The card's side of a step. ``woken``: the pool sleeps until it is told that a unit is near."""

    def __init__(self, pool: HostPool, woken: bool = False) -> None:
        gate, up, down = normal(MIDDLE, HIDDEN) / 8, normal(MIDDLE, HIDDEN) / 8, normal(HIDDEN, MIDDLE) / 9
        ffn = HostFfn(matrix_of(gate), matrix_of(up), matrix_of(down))
        self.units = [ffn, HostFfn(None, matrix_of(up), matrix_of(down)), host_linear(matrix_of(normal(VOCABULARY, HIDDEN)))]
        self.ask, self.done = flags(3), flags(3)
        self.x, self.y = torch.zeros(ROWS * HIDDEN).bfloat16(), torch.zeros(ROWS * VOCABULARY).bfloat16()
        self.pool, self.near = pool, flags(3) if woken else None
        self.serve = pool.serve(self.units, ROWS, HIDDEN, self.ask, self.done, self.x, self.y, self.near)

    def asked(self, number: int, x: torch.Tensor) -> torch.Tensor:
        if self.near is not None and number != 1:  # of one unit it is not said
            self.near[number, 0] = 1
        self.x[: x.numel()] = x.flatten()
        self.ask[number, 0] = 1
        end = time.monotonic() + HANGS_S
        while not self.done[number, 0]:
            assert time.monotonic() < end, "the unit is done"
        self.done[number, 0] = 0
        outputs = self.units[number].outputs
        return self.y[: x.shape[0] * outputs].view(x.shape[0], outputs).clone()

    def expected(self, number: int, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], self.units[number].outputs, dtype=torch.bfloat16)
        self.pool.ffn(self.units[number], x, out)
        return out


@pytest.fixture(params=[False, True], ids=["spins", "is woken"])
def asking(pool: HostPool, request: pytest.FixtureRequest) -> Iterator[Asking]:
    made = Asking(pool, request.param)
    yield made
    made.serve.close()


def test_units_that_are_asked_for_at_once_have_places_of_their_own(pool: HostPool) -> None:
    blocks = [normal(count, HIDDEN) for count in (VOCABULARY, 7, VOCABULARY)]
    units = [host_linear(matrix_of(block)) for block in blocks]
    ask, done, x = flags(3), flags(3), normal(ROWS, HIDDEN)
    places = [0, ROWS * VOCABULARY, ROWS * (VOCABULARY + 7)]
    y = torch.zeros(ROWS * (2 * VOCABULARY + 7)).bfloat16()
    with pytest.raises(ValueError, match="y is"):
        pool.serve(units, ROWS, HIDDEN, ask, done, x.flatten(), y[:-1], at=places)
    with pool.serve(units, ROWS, HIDDEN, ask, done, x.flatten(), y, at=places) as serve:
        for _ in range(3):
            serve.begin_step()
            for number in (2, 0, 1):
                ask[number, 0] = 1
            end = time.monotonic() + HANGS_S
            while not done[:, 0].all():
                assert time.monotonic() < end, "all are done"
            done.zero_()
            for unit, at in zip(units, places, strict=True):
                out = torch.empty(ROWS, unit.outputs, dtype=torch.bfloat16)
                while not serve.ended:
                    pass
                pool.ffn(unit, x, out)
                assert torch.equal(y[at : at + ROWS * unit.outputs].view(ROWS, -1), out)


def test_each_step_answers_what_it_is_asked(asking: Asking) -> None:
    for rows in (1, ROWS, 2, 1):
        x = normal(rows, HIDDEN)
        expected = [asking.expected(number, x) for number in range(3)]
        asking.serve.begin_step(rows)
        assert all(torch.equal(asking.asked(number, x), expected[number]) for number in range(3))
        assert not asking.ask.any(), "the flags of what was asked are cleared"
        while not asking.serve.ended:
            pass


def test_a_step_that_asks_sooner_or_later_than_those_before_is_answered(asking: Asking) -> None:
    """Whatever the gap, also one in which threads begin to nap."""
    x = normal(ROWS, HIDDEN)
    expected = [asking.expected(number, x) for number in range(3)]
    for gap_s in (0.003, 0.003, 0.0, 0.03, 0.0):
        asking.serve.begin_step()
        for number in range(3):
            time.sleep(gap_s)
            assert torch.equal(asking.asked(number, x), expected[number])
        while not asking.serve.ended:
            pass


def test_times_tell_the_order_of_units(asking: Asking) -> None:
    before = time.perf_counter()
    asking.serve.begin_step()
    for number in range(3):
        asking.asked(number, normal(ROWS, HIDDEN))
    moments = [before, *(moment for times in asking.serve.times() for moment in times), time.perf_counter()]
    assert moments == sorted(moments)


def test_what_was_done_is_counted(asking: Asking) -> None:
    before = asking.pool.told()
    asking.serve.begin_step()
    for number in range(3):
        asking.asked(number, normal(ROWS, HIDDEN))
    told, wanted = asking.pool.told(), sum(unit.bytes for unit in asking.units)
    until = time.monotonic() + 30
    while told.bytes - before.bytes < wanted and time.monotonic() < until:  # a unit has ended a moment before it is counted
        told = asking.pool.told()
    assert asking.serve.ended and told.bytes - before.bytes == wanted
    assert told.busy_s > before.busy_s


def test_a_step_that_is_not_over_lets_none_begin(asking: Asking) -> None:
    asking.serve.begin_step()
    asking.asked(0, normal(ROWS, HIDDEN))
    with pytest.raises(RuntimeError, match="has not asked for 2 of the 3 units"):
        asking.serve.begin_step()
    asking.serve.abandon()
    asking.serve.begin_step()
    x = normal(ROWS, HIDDEN)
    for number in range(3):
        assert torch.equal(asking.asked(number, x), asking.y[: ROWS * asking.units[number].outputs].view(ROWS, -1))


@pytest.mark.parametrize("woken", [False, True])
def test_closing_in_the_middle_of_a_step_ends_it(pool: HostPool, woken: bool) -> None:
    made = Asking(pool, woken)
    made.serve.begin_step()
    made.asked(0, normal(ROWS, HIDDEN))
    made.serve.close()
    made.serve.close()
    with pytest.raises(ValueError, match="closed"):
        made.serve.begin_step()
    out = torch.empty(1, HIDDEN, dtype=torch.bfloat16)
    pool.ffn(made.units[0], normal(1, HIDDEN), out)


@pytest.mark.parametrize("woken", [False, True])
def test_an_interrupt_while_threads_wait_reaches_the_interpreter(pool: HostPool, woken: bool) -> None:
    made = Asking(pool, woken)
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        with pytest.raises(KeyboardInterrupt), made.serve as serve:
            serve.begin_step()
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            time.sleep(HANGS_S)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_threads_rest_when_no_step_runs(asking: Asking) -> None:
    asking.serve.begin_step()
    for number in range(3):
        asking.asked(number, normal(ROWS, HIDDEN))
    end = time.monotonic() + HANGS_S
    while set(states("penstock-beside")) != {"S"}:
        assert time.monotonic() < end, "all sleep"


def test_threads_sleep_in_a_step_until_its_next_unit_is_near(pool: HostPool) -> None:
    """Other ranks' threads have the same cores."""
    made = Asking(pool, woken=True)
    assert made.near is not None
    with made.serve as serve:
        for _ in range(2):
            serve.begin_step()
            assert not made.near.any(), "what was near in the step before is not in this one"
            for number in range(3):
                end = time.monotonic() + HANGS_S
                while set(states("penstock-beside")) != {"S"}:
                    assert time.monotonic() < end, "all sleep between two units"
                made.near[number, 0] = 1
                while "R" not in states("penstock-beside"):
                    assert time.monotonic() < end, "they spin for a unit that is near"
                made.asked(number, normal(ROWS, HIDDEN))


def test_steps_of_two_schedules_have_one_thread_that_looks(pool: HostPool) -> None:
    both = Asking(pool, woken=True), Asking(pool, woken=True)
    x = normal(2, HIDDEN)
    expected = [[asking.expected(number, x) for number in range(3)] for asking in both]
    for turn in range(40):
        asking, want = both[turn % 2], expected[turn % 2]
        asking.serve.begin_step(2)
        assert all(torch.equal(asking.asked(number, x), want[number]) for number in range(3))
        while not asking.serve.ended:
            pass
    assert len(states("penstock-looks")) == 1
    for asking in both:
        asking.serve.close()


INTERRUPTED = """
import os, signal, time
from tests.runtime.beside.test_host_serve import Asking, HostPool, ROWS, HIDDEN, normal

signal.signal(signal.SIGINT, signal.default_int_handler)
for asked in (0, 0, 0, 1):
    process = os.fork()
    if not process:
        made = Asking(HostPool(2), woken=True)
        made.serve.begin_step()
        [made.asked(number, normal(ROWS, HIDDEN)) for number in range(asked)]
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""
"""Processes that import torch once between them."""


def test_a_process_ends_by_an_interrupt_while_a_thread_looks() -> None:
    """In the middle of a step that nobody goes on with, and that nobody closes: before its first unit, and before its second one. Three of
    five ended by SIGSEGV, since the interpreter freed what the thread was reading. A child that was forked ends by the signal in Python
    3.11, with status 1 in 3.12."""
    run = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", INTERRUPTED]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=CLI_HANGS_S, check=False)
    ended = [int(status) for status in done.stdout.split()]
    assert len(ended) == 4 and {*ended} <= {-signal.SIGINT, 1}, (ended, done.stderr)
    assert done.stderr.count("KeyboardInterrupt") == 4


def states(name: str) -> list[str]:
    """Of this process's threads of that name, as the kernel tells them."""
    told = [path.read_text() for path in Path("/proc/self/task").glob("*/stat")]
    return [text.rpartition(")")[2].split()[0] for text in told if f"({name})" in text]


def test_buffers_that_are_too_small_are_refused(asking: Asking) -> None:
    x, y, ask, done = asking.x, asking.y, asking.ask, asking.done
    few = flags(2)
    for wrong in ((ask[:2], done, x, y), (ask, done.long(), x, y), (ask, done, x[:-1], y), (ask, done, x, y[:-1]), (ask, done, x, y, few)):
        with pytest.raises(ValueError, match="contiguous torch"):
            asking.pool.serve(asking.units, ROWS, HIDDEN, *wrong)
    with pytest.raises(ValueError, match="rows of 64, where the step's have 65"):
        asking.pool.serve(asking.units, ROWS, HIDDEN + 1, ask, done, x, y)
    with pytest.raises(ValueError, match="5 rows, where the buffers hold 1 to 4"):
        asking.serve.begin_step(ROWS + 1)
    with pytest.raises(ValueError, match="one of each at least"):
        HostServe(0, [], 1, ask, done, x, y)
