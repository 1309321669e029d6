"""What is declared of a decision beside its name, type and docstring, which are its field's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.planner.contract.decided.allowed import Allowed


@dataclass(frozen=True)
class Decision:
    """Stands in the ``Annotated`` of a field of ``Decisions``. What follows from it: the schema's key, its help, its line in docs/keys.md,
    what is forced, the rule, the row on the terminal. `planner explain` tries its neighbours."""

    allowed: Allowed | Callable[[Any], Allowed]
    """In any plan, or a function of a ``contract.rules.setting.Setting``."""
    key: str | None = None
    """What a user sets to fix it, ``force.NAME`` or ``moe.NAME``; None: it follows from others."""
    row: str | None = None
    """The row of the table that `planner solve` prints; None: it is shown in no words of its own."""
    text: str = "{}"
    """Its words there; empty where what follows from it says more."""
    aside: bool = False
    """Whether these stand behind the others of the row, dimmed."""
    weighed: bool = False
    """Whether the program chooses it for the time that it takes."""
    card: bool = False
    """Whether it means something beside a GPU alone."""
    placed: bool = False
    """Whether what it may be follows from where weights lie, so that it is asked only where all other decisions are sound."""


class Given:
    """Stands in the ``Annotated`` of a field of ``Decisions`` that nobody decides: it comes with a decision beside it."""
