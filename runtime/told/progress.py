"""One progress line on stderr for the phases of a long command."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn

from penstock.planner.common.bars import make_bar
from penstock.planner.common.interrupt import raise_if_interrupted, uninterrupted


class PhaseBar:
    """Call it with (phase, done, total); a phase's bar goes when the next begins. Nothing is drawn off a terminal."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description:>9}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn())
        self._progress = make_bar(*columns)
        self._phase: tuple[str, TaskID] | None = None

    def __enter__(self) -> PhaseBar:
        try:
            with uninterrupted():
                self._progress.start()
        except BaseException:  # a signal, heard only now: without an enter there is no exit
            self._progress.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def rest(self) -> None:
        """Draw nothing until the next phase: something else is written to the terminal."""
        if self._phase is not None:
            self._progress.remove_task(self._phase[1])
            self._phase = None
        self._progress.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        raise_if_interrupted()
        if self._phase is None or self._phase[0] != phase:
            if self._phase:
                self._progress.remove_task(self._phase[1])
            self._progress.start()
            self._phase = phase, self._progress.add_task(phase, total=total)
        self._progress.update(self._phase[1], completed=done, total=total)
