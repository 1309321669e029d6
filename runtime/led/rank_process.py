"""A rank behind the first one: it opens what rank 0 opens, and computes what rank 0 computes.

``python -m penstock.runtime.led.rank_process``
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from functools import partial
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import import_torch, uncollected
from penstock.planner.common.outside.card_errors import card_trouble
from penstock.planner.common.outside.starved import starved
from penstock.planner.common.threads import wait_asleep
from penstock.runtime.company.company import Company, seat_of_environment
from penstock.runtime.company.starting import enter
from penstock.runtime.memory.kernels import keep_few_kernels


def be_led(company: Company, checkpoint: Path | None = None) -> None:
    """Open and compute until rank 0 leaves. What goes wrong here ends all ranks, and rank 0 tells of it."""
    try:
        import_torch()
        with uncollected():  # before the others are met: rank 0 comes when it has imported as much
            from penstock.runtime.led import open_led
        company.join()
        gc.freeze()  # what was imported lives as long as the process: no pass waits while it is searched
        while (words := company.hear())["what"] == "open":
            open_led.follow_one(company, words, checkpoint, partial(_fail, company))
        company.answer({"left": True})
        company.leave()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        _fail(company, error)


def _fail(company: Company, error: BaseException) -> None:
    """Tell the watchdog, and end at once, from whichever thread: other ranks may wait for this one in a kernel."""
    import traceback

    mistake = error if isinstance(error, UserError) else None
    if mistake is None and isinstance(error, Exception):
        mistake = starved(error) or card_trouble(error)
    if mistake is None:
        traceback.print_exc()
    line = str(mistake) if mistake is not None else f"{type(error).__name__}: {error}"
    company.failed(2 if mistake is not None else 1, line)
    sys.stderr.flush()
    os._exit(2 if mistake is not None else 1)


def main() -> None:
    """Entry point."""
    for number in (signal.SIGINT, signal.SIGHUP):  # those of a terminal: rank 0 says when all is over
        signal.signal(number, signal.SIG_IGN)
    keep_few_kernels()
    wait_asleep()
    seat = seat_of_environment()
    assert seat is not None, "a launcher says which rank this is"
    be_led(enter(seat))
    os._exit(0)  # all is given back: what a library does at its end is of no use


if __name__ == "__main__":
    main()
