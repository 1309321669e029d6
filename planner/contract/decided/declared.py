"""Every decision of a plan, as ``Decisions`` declares it: where it stands, what fixes it, what it may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from types import NoneType
from typing import Any, get_args, get_type_hints

from penstock.planner.contract.decided.decision import Decision, Given
from penstock.planner.contract.decided.decisions import Decisions

SHORT = {"moe": "expert_"}
"""Section of a key -> what its names begin with in ``Force``, where names of all sections stand side by side."""


@dataclass(frozen=True)
class Declared:
    """One decision: ``how`` is what its field's annotation says."""

    place: str
    """Dotted, as in the plan's file: ``weights.ssd.block_bytes``."""
    kind: type
    owner: type
    """The dataclass whose field it is, under which its docstring stands."""
    how: Decision

    @cached_property
    def path(self) -> tuple[str, ...]:
        """The names of ``place``."""
        return tuple(self.place.split("."))

    @property
    def field(self) -> str:
        return self.place.rpartition(".")[2]

    @property
    def key(self) -> str:
        """What a user sets to fix it; empty where nobody can."""
        return self.how.key or ""

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def leaf(self) -> str:
        """The key within its section."""
        return self.key.partition(".")[2]

    @property
    def name(self) -> str:
        """Among those of ``Force``."""
        return SHORT.get(self.section, "") + self.leaf

    def of(self, decisions: Decisions) -> Any:
        """Its value; None where ``decisions`` have no such section."""
        value: Any = decisions
        for name in self.path:
            if value is None:
                return None
            value = getattr(value, name)
        return value

    def put(self, decisions: Decisions, value: Any) -> Decisions:
        """``decisions`` with ``value``; as they are where they have no such section."""
        return _put(decisions, list(self.path), value)


def _put(part: Any, names: list[str], value: Any) -> Any:
    if part is None:
        return None
    inner = value if len(names) == 1 else _put(getattr(part, names[0]), names[1:], value)
    return part if getattr(part, names[0]) == inner else replace(part, **{names[0]: inner})


def _walk(owner: type, place: str) -> Iterator[Declared]:
    plain, full = get_type_hints(owner), get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(owner):
        notes = getattr(full[field.name], "__metadata__", ())
        if Given in notes:
            continue
        how = next((note for note in notes if isinstance(note, Decision)), None)
        kind = next((part for part in get_args(plain[field.name]) if part is not NoneType), plain[field.name])
        if how is not None:
            yield Declared(place + field.name, kind, owner, how)
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _walk(kind, f"{place}{field.name}.")
        else:
            raise TypeError(f"{owner.__name__}.{field.name} is declared by no Decision")


DECLARED: tuple[Declared, ...] = tuple(_walk(Decisions, ""))
"""In the order of a plan's file."""
FORCED: dict[str, Declared] = {d.name: d for d in DECLARED if d.key}
"""Those that a user can fix, by their names in ``Force``."""
