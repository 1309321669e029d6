"""Sections of the configuration whose keys are a plan's decisions, each as its field in ``Decisions`` declares it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from penstock.planner.common.command.known_keys import DECLARED_AT
from penstock.planner.contract.decided.declared import FORCED

Section = TypeVar("Section", bound="DecidedKeys")


class DecidedKeys:
    """A section whose keys are no fields that a type checker could see."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

        def __init__(self, **given: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...


def decided_keys(section: str) -> Callable[[type[Section]], type[Section]]:
    """Makes a class the dataclass of its own fields and of a key, null by default, for each decision that ``section.NAME`` fixes."""

    def make(cls: type[Section]) -> type[Section]:
        for one in FORCED.values():
            if one.section == section:
                cls.__annotations__[one.leaf] = one.kind | None
                setattr(cls, one.leaf, field(default=None, metadata={DECLARED_AT: (one.owner, one.field)}))
        return dataclass(cls)

    return make
