"""The console scripts ``planner`` and ``runtime``: signals are heard and the standard streams made good before anything is imported."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from types import FrameType

_ENDED = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


def planner() -> None:
    """Entry point of ``planner``."""
    _start("planner")


def runtime() -> None:
    """Entry point of ``runtime``."""
    _start("runtime")


def _start(program: str) -> None:
    """Run ``penstock.PROGRAM.cli``. Until it hears signals itself nothing was taken, so that one ends the process on the spot.

    What a start imports lives as long as the process. The garbage collector leaves it alone, and at the end everything: to search it over
    and over is an eighth of what `planner solve` takes.
    """

    def end(number: int, frame: FrameType | None) -> None:
        line = f"{program}: {_ENDED[signal.Signals(number)]}\n"
        try:
            os.write(2, line.encode())
        finally:
            os._exit(128 + number)

    for number in _ENDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    gc.disable()
    atexit.register(gc.freeze)
    from penstock.planner.common.outside.streams import open_streams

    open_streams()
    try:
        from importlib import import_module

        main = import_module(f"penstock.{program}.cli").main
    except (MemoryError, OSError, ImportError, RuntimeError, SystemError) as error:
        from penstock.planner.common.outside.starved import starved

        mistake = starved(error)
        if mistake is None:
            raise
        print(f"{program}: {mistake}", file=sys.stderr)
        sys.exit(2)
    gc.freeze()
    gc.enable()
    main()
