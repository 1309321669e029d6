"""Solves that do not depend on each other, on as many cores as there are: HiGHS computes without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from penstock.planner.common.host_memory import usable_cores

Given = TypeVar("Given")
Found = TypeVar("Found")


def side_by_side(solve: Callable[[Given], Found], given: Sequence[Given], advance: Callable[[], None]) -> list[Found]:
    """``solve`` of each of ``given``, in their order. ``advance`` is called behind each, by the calling thread. What one of them raises,
    and an interrupt, is raised when those under way have ended; the others are not begun."""
    with ThreadPoolExecutor(max(1, min(len(given), usable_cores())), "penstock-solves") as pool:
        solving = [pool.submit(solve, one) for one in given]
        try:
            return [_found(each, advance) for each in solving]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _found(solving: Future[Found], advance: Callable[[], None]) -> Found:
    found = solving.result()
    advance()
    return found
