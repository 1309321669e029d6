"""What a probe finds: figures with their origin, and what could not be measured and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.planner.common.origins import UNMEASURED


class CannotMeasure(Exception):
    """Why a figure cannot be had here. The probe records the reason and goes on."""


@dataclass(frozen=True)
class Figure:
    """One measured figure: the dotted path in the hardware profile, its value and how it was measured."""

    path: str
    value: Any
    how: str


class Findings:
    """Figures by dotted path, and the origin of each."""

    def __init__(self, date: str) -> None:
        self.date = date
        self._values: dict[str, Any] = {}
        self.origin: dict[str, str] = {}

    def add(self, figure: Figure) -> None:
        self._values[figure.path] = figure.value
        self.origin[figure.path] = f"measured {self.date}: {figure.how}"

    def how(self, path: str) -> str:
        """How ``path`` was measured; empty where it was not."""
        return self.origin.get(path, "").partition(f"measured {self.date}: ")[2]

    def lack(self, paths: Iterable[str], why: str) -> None:
        """Record that ``paths`` could not be measured."""
        for path in paths:
            self.origin[path] = UNMEASURED + why

    def attempt(self, paths: tuple[str, ...], measure: Callable[[], Iterable[Figure]]) -> bool:
        """Add what ``measure`` yields; what fails is recorded for those of ``paths`` still without a figure.

        Returns whether all went well. An interrupt passes through.
        """
        try:
            for figure in measure():
                self.add(figure)
        except (CannotMeasure, OSError, RuntimeError, MemoryError, ValueError) as error:
            why = str(error) if isinstance(error, CannotMeasure) else f"{type(error).__name__}: {error}"
            first_line = why.strip().splitlines()[0] if why.strip() else type(error).__name__
            self.lack((path for path in paths if path not in self._values), first_line)
            return False
        return True

    def mark(self, what: str, paths: Iterable[str] | None = None) -> None:
        """Add ``what`` to the origin of measured figures: of ``paths``, or of all."""
        for path in list(self.origin if paths is None else paths):
            if self.origin.get(path, "").startswith("measured "):
                self.origin[path] += f", {what}"

    def number(self, path: str) -> float:
        """The figure, or 0 where it was not measured."""
        return float(self._values.get(path, 0.0))

    def numbers(self, path: str) -> list[float]:
        """The figures in a row, none where they were not measured."""
        return list(self._values.get(path, []))

    def by_name(self, path: str) -> dict[str, float]:
        """The figures by name, none where they were not measured."""
        return dict(self._values.get(path, {}))

    def tables(self, path: str) -> dict[str, list[list[float]]]:
        """The tables by name, none where they were not measured."""
        return dict(self._values.get(path, {}))

    def counts(self, path: str) -> dict[str, int]:
        """The counts by name, none where they were not measured."""
        return dict(self._values.get(path, {}))

    def rows(self, path: str) -> list[list[float]]:
        """The table, without rows where it was not measured."""
        return list(self._values.get(path, []))
