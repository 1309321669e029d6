"""What a number may be, stated on its field and checked in one place, by the name that a user sets."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, get_type_hints

from penstock.planner.common.errors import UserError


@dataclass(frozen=True)
class Bounds:
    """Stands in the ``Annotated`` of a field: numbers from ``least`` to ``most``, both included."""

    least: float
    most: float
    or_zero: bool = False
    """0 is allowed, too: not measured."""
    zero: str = ""
    """What is said of 0 and less where ``least`` is a small fraction: `above 0`."""

    def flaw(self, value: float) -> str | None:
        """What ``value`` must be instead; None where it may be."""
        if self.least <= value <= self.most or (self.or_zero and value == 0):
            return None
        if value > self.most:
            return f"must be at most {_shown(self.most)}" if value != math.inf else "must be a finite number"
        if value <= 0 and self.zero:
            return f"must be {self.zero}"
        return f"must be {'0, or ' if self.or_zero and self.least != 1 else ''}{self.least:g} or more"


def _shown(limit: float) -> str:
    """Short where that says all of it: ``1e+06``, ``1048576``."""
    short = f"{limit:g}"
    return short if float(short) == limit else str(limit)


EXABYTE = 2**60
COUNT_BYTES = Bounds(0, EXABYTE)
SOME_BYTES = Bounds(1, EXABYTE)
RATE = Bounds(1e-6, 1e9, zero="above 0")
"""GB/s, TFLOPS."""
RATE_IF_MEASURED = Bounds(1e-6, 1e9, or_zero=True, zero="0 or more")
SHARE = Bounds(1e-3, 1, zero="above 0")
SHARE_IF_MEASURED = Bounds(1e-3, 1, or_zero=True, zero="0 or more")
SECONDS = Bounds(0, 1e6)
SOME_SECONDS = Bounds(1e-12, 1e6, zero="above 0")
CORES = Bounds(1, 2**20)
"""And threads."""
TOKENS = Bounds(1, 2**31)
TOKENS_OR_NONE = Bounds(0, 2**31)
MOST_LAYERS, MOST_EXPERTS, MOST_DEPTH = 10_000, 2**15, 4096
MOST_ELEMENTS = 2**56
"""Of a unit of weights."""


def check_bounds(value: Any, where: str) -> None:
    """UserError for the first field of the dataclass ``value``, or of one inside, whose number is not within its ``Bounds``."""
    check_own_bounds(value, f"{where}.")
    for field in dataclasses.fields(value):
        one = getattr(value, field.name)
        if dataclasses.is_dataclass(one):
            check_bounds(one, f"{where}.{field.name}")


def check_own_bounds(value: Any, where: str = "") -> None:
    """The same of ``value``'s own numbers alone; ``where`` stands before their names."""
    hints = get_type_hints(type(value), include_extras=True)
    for field in dataclasses.fields(value):
        one = getattr(value, field.name)
        bounds = next((note for note in getattr(hints[field.name], "__metadata__", ()) if isinstance(note, Bounds)), None)
        if bounds is not None and one is not None and (flaw := bounds.flaw(one)):
            raise UserError(f"{where}{field.name}={one}: {flaw}")
