"""Where two plans differ: figure by figure, under the names that their files use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import as_mapping, broken_in


class Part(StrEnum):
    """What a difference is about."""

    decided = "decided"
    predicted = "predicted"
    assumed = "assumed"


SECTIONS = {
    Part.decided: (
        "weights",
        "kv",
        "experts",
        "batch",
        "prefill_chunk_tokens",
        "speculation",
        "prefill_part_tokens",
        "recorded_prompt_tokens",
        "ranks",
    ),
    Part.predicted: ("predicted", "break_even_tokens"),
    Part.assumed: ("hardware", "model", "workload"),
}
ORIGIN = "hardware.origin."
"""The origins of figures are not compared; the figures are."""
SAME = 1e-9
"""Ratios this near to 1 are rounding: a written prediction has six figures, but both are computed anew when they are read."""


@dataclass(frozen=True)
class Difference:
    """``a`` and ``b`` under one name; None where a plan has nothing of the name."""

    part: Part
    name: str
    a: Any
    b: Any

    @property
    def ratio(self) -> float | None:
        """b / a, of numbers."""
        if not (_is_number(self.a) and _is_number(self.b)) or not self.a:
            return None
        return self.b / self.a


@dataclass(frozen=True)
class PlanDiff:
    """Two plans, and the rules that each breaks: a prediction of such a plan is as it was written."""

    differences: tuple[Difference, ...]
    broken_a: tuple[str, ...]
    broken_b: tuple[str, ...]


def compare(a: Plan, b: Plan) -> PlanDiff:
    """What differs, in the order of the files."""
    flat_a, flat_b = dict(_flat(as_mapping(a))), dict(_flat(as_mapping(b)))
    found = []
    for part, sections in SECTIONS.items():
        for name in dict.fromkeys([*flat_a, *flat_b]):
            one, other = flat_a.get(name), flat_b.get(name)
            if name.partition(".")[0] in sections and not name.startswith(ORIGIN) and not _same(one, other):
                found.append(Difference(part, name, one, other))
    return PlanDiff(tuple(found), _broken(a), _broken(b))


def document(comparison: PlanDiff) -> dict[str, Any]:
    """``comparison`` for JSON."""
    return {
        "same": not comparison.differences,
        "differences": [
            {"part": str(d.part), "name": d.name, "a": d.a, "b": d.b, "ratio": None if d.ratio is None else float(f"{d.ratio:.6g}")}
            for d in comparison.differences
        ],
        "broken_rules": {"a": list(comparison.broken_a), "b": list(comparison.broken_b)},
    }


def _broken(plan: Plan) -> tuple[str, ...]:
    return tuple(rule.message for rule in broken_in(plan))


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if key == "units":
            yield from _flat(_by_kind(item), f"{prefix}{key}.")
        elif isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield prefix + key, item


def _by_kind(rows: list[Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """Rows of a model's units by kind; by kind and layers where a kind's units differ."""
    kinds = Counter(row["kind"] for row in rows)
    names = (row["kind"] if kinds[row["kind"]] == 1 else f"{row['kind']} {row['layers']}" for row in rows)
    return {name: {key: value for key, value in row.items() if key != "kind"} for name, row in zip(names, rows, strict=True)}


def _same(a: Any, b: Any) -> bool:
    if _is_number(a) and _is_number(b):
        return abs(a - b) <= SAME * max(abs(a), abs(b))
    return a == b


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
