"""A stream of weights that somebody listens to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.model.binding import WeightStream


class HeardStream:
    """``inner``; ``heard`` is told of each unit that was entered."""

    def __init__(self, inner: WeightStream, heard: Callable[[Unit], None]):
        self._inner, self._heard = inner, heard

    def begin_pass(self) -> None:
        self._inner.begin_pass()

    def enter(self, unit: Unit) -> Mapping[str, nn.Parameter]:
        views = self._inner.enter(unit)
        self._heard(unit)
        return views

    def leave(self, unit: Unit) -> None:
        self._inner.leave(unit)

    def end_pass(self) -> None:
        self._inner.end_pass()
