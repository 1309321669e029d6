"""Ending by SIGTERM as by Ctrl-C: everything is given back, whenever it comes."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those that ask a program to end."""
DEAF_S = 1.0
"""Seconds after a signal in which others are ignored. A terminal and a supervisor may both send one, and cleanup must not be cut short."""
LEFT_BY_READER = 141
"""The status after whoever reads standard output has closed it, as `head` does: that of a program which SIGPIPE ends."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""

    status, word = 143, "terminated"


class HungUp(Terminated):
    """SIGHUP came: the terminal was closed."""

    status, word = 129, "hung up"


_ENDS: dict[int, type[KeyboardInterrupt]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}
_Raised = list[tuple[float, KeyboardInterrupt]]
_raised: ContextVar[_Raised | None] = ContextVar("raised", default=None)


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM raises Terminated inside, SIGHUP HungUp, SIGINT KeyboardInterrupt; a second signal right after the first does nothing.

    A library's cleanup may raise on the way out: that exception leaves as the interrupt. A library or a finalizer may swallow the
    interrupt: :func:`raise_if_interrupted` raises it again, and Python does not print it. A signal that the process was started to ignore
    stays ignored. Off the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: _Raised = []

    def interrupt(number: int, frame: object) -> None:
        now = time.monotonic()
        if not raised or now - raised[-1][0] >= DEAF_S:
            raised.append((now, _ENDS[number]()))
            raise raised[-1][1]

    tell = sys.unraisablehook

    def tell_of_others(unraisable: Any) -> None:
        if not any(unraisable.exc_value is error for _, error in raised):
            tell(unraisable)

    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    usual = {number: signal.signal(number, interrupt) for number in heard}
    token = _raised.set(raised)
    sys.unraisablehook = tell_of_others
    try:
        yield
    except Exception as error:
        if raised:
            raise raised[-1][1] from error
        raise
    finally:
        _raised.reset(token)
        sys.unraisablehook = tell
        for number, handler in usual.items():
            signal.signal(number, handler)


def raise_if_interrupted() -> None:
    """Raise what a signal raised earlier, if whoever it met swallowed it: called where long work begins or goes on."""
    raised = _raised.get()
    if raised:
        raise raised[-1][1]


@contextmanager
def uninterrupted() -> Iterator[list[int]]:
    """``SIGNALS`` that come inside are heard at the end: for the moment between taking something and noting how it is given back.
    The list is of those that came.

    Off the main thread, where no signal is heard, nothing changes.
    """
    came: list[int] = []
    try:
        with noted(came):
            yield came
    finally:
        for first in came[:1]:
            signal.raise_signal(first)


@contextmanager
def noted(came: list[int], worth: Callable[[], bool] = lambda: True, numbers: Sequence[int] = SIGNALS) -> Iterator[None]:
    """Signals of ``numbers`` that come inside are added to ``came`` and do nothing else, as long as ``worth`` says that there is something
    to lose: whoever is inside looks at the list. Off the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}

    def note(number: int, frame: FrameType | None) -> None:
        handler = usual[number]
        if worth() or not callable(handler):
            came.append(number)
        else:
            handler(number, frame)

    try:
        for number in usual:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def import_torch() -> None:
    """Import torch with signals held back, for about a second. An exception raised inside torch's C++ initialisation would abort the
    process."""
    with uninterrupted(), uncollected():
        importlib.import_module("torch")


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, nothing is collected. Imports make half a million objects, of which none goes, and a collection looks at all that live. With
    it torch and transformers take 6.1 s of a processor's time, without it 3.7 s."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
