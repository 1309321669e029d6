"""Ending by SIGTERM as by Ctrl-C: everything is given back, whenever it comes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

DEAF_S = 1.0
"""Seconds after a signal in which others are ignored: a terminal and a supervisor may both send one, and what gives everything back must
not be cut short."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM raises Terminated inside, SIGINT KeyboardInterrupt; a second signal right after the first does nothing.

    A signal that the process was started to ignore stays ignored; off the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = float("-inf")

    def interrupt(number: int, frame: object) -> None:
        nonlocal came
        now = time.monotonic()
        if now - came >= DEAF_S:
            came = now
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    usual = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM that come inside are heard at the end: for the moment between taking something and noting how it is given back.

    Off the main thread, where no signal is heard, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)

    heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    usual = {number: signal.signal(number, note) for number in heard}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)
