"""What a decision may be in one plan: a span of numbers, or one of several values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """Numbers from ``least`` to ``most`` (None: no end), multiples of ``multiple`` where that is one."""

    least: float = 0
    most: float | None = None
    multiple: int | None = None
    also: tuple[float, ...] = ()
    """Allowed outside the span, too."""
    step: float = 1
    """To the next value that is worth trying."""
    why: str = ""
    """Stands behind what is allowed."""
    rule: str = ""
    """Name of the rule that a value below the span breaks, and one above it; empty: the decision's place in the plan, and `range`."""
    rule_above: str | None = None
    """The second of these, where it has another name."""

    def __contains__(self, value: float) -> bool:
        inside = self.least <= value and (self.most is None or value <= self.most) and not (self.multiple and value % self.multiple)
        return inside or value in self.also

    @property
    def words(self) -> str:
        if self.most == self.least:
            ends = f"{self.least}"
        else:
            ends = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"
        multiples = f"multiples of {self.multiple}, " if self.multiple else ""
        return multiples + ends + "".join(f" or {value}" for value in self.also)

    def rule_of(self, value: float, place: str) -> str:
        """The rule that ``value`` breaks, of the decision at ``place``."""
        above = self.most is not None and value > self.most
        return (self.rule if self.rule_above is None or not above else self.rule_above) or f"{place} range"

    def nearest(self, value: float) -> float:
        """The allowed value next to ``value``."""
        high = value if self.most is None else min(value, self.most)
        return max(self.least, high // self.multiple * self.multiple if self.multiple else high)

    def beside(self, value: float) -> list[float]:
        """One step down and up, no further than the ends."""
        step = max(self.step, self.multiple or 0)
        ends = (max(self.least, value - step), value + step if self.most is None else min(self.most, value + step))
        return [end for end in ends if end != value]


@dataclass(frozen=True)
class OneOf:
    """One of ``values``."""

    values: tuple[Any, ...]
    why: str = ""
    rule: str = ""

    def __contains__(self, value: Any) -> bool:
        return value in self.values

    @property
    def words(self) -> str:
        return ", ".join(map(str, self.values))

    def rule_of(self, value: Any, place: str) -> str:
        return self.rule or f"{place} choice"

    def nearest(self, value: Any) -> Any:
        """Of numbers the nearest, of names the first."""
        return min(self.values, key=lambda v: abs(v - value)) if _are_numbers(self.values) else self.values[0]

    def beside(self, value: Any) -> list[Any]:
        """Of numbers those next to ``value``, of names all others."""
        return next_to(self.values, value) if _are_numbers(self.values) else [v for v in self.values if v != value]


@dataclass(frozen=True)
class Each:
    """Any number of values, of which ``one`` allows each."""

    one: Span
    why: str = ""

    def __contains__(self, values: Iterable[float]) -> bool:
        return all(value in self.one for value in values)

    @property
    def words(self) -> str:
        return f"numbers from {self.one.words}"

    def rule_of(self, values: Any, place: str) -> str:
        """The rule that ``values`` break, of the decision at ``place``."""
        return f"{place} range"

    def nearest(self, values: Iterable[float]) -> tuple[float, ...]:
        """The allowed ones next to ``values``."""
        return tuple(self.one.nearest(value) for value in values)

    def beside(self, values: Any) -> list[Any]:
        """None is worth trying."""
        return []


Allowed = Span | OneOf | Each


def next_to(values: Iterable[float], value: float) -> list[float]:
    """The nearest of ``values`` below and above ``value``."""
    return [*sorted(v for v in values if v < value)[-1:], *sorted(v for v in values if v > value)[:1]]


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(v, int | float) for v in values)
