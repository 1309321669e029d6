"""compressed-tensors with several groups: each stores the modules that it targets in its own way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.planner.contract.given.formats import Format
from penstock.planner.contract.stored.scheme import Scheme
from penstock.planner.contract.stored.stored_matrix import Leaf, StoredMatrix

ANY = "Linear"
"""The target that is every linear layer."""


@dataclass(frozen=True)
class Group:
    """One group of a quantization_config."""

    scheme: Scheme
    targets: tuple[str, ...]
    """Names of modules, ``re:`` and an expression that a name begins with, or :data:`ANY`."""

    def names(self, matrix: str) -> bool:
        """Whether it targets the matrix ``...q_proj.weight`` by its module's name."""
        module = matrix.removesuffix(".weight")
        return any(re.match(target[3:], module) if target.startswith("re:") else target == module for target in self.targets)


@dataclass(frozen=True)
class MixedStored:
    """A group that names a module comes before one that targets all, as compressed-tensors has it; the first of several does."""

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, groups: Iterable[tuple[Scheme, tuple[str, ...]]]) -> MixedStored:
        """Of each group's scheme and targets, in the config's order."""
        return cls(tuple(Group(*group) for group in groups))

    def part(self, tensor: str) -> tuple[str, str] | None:
        found = (group.scheme.part(tensor) for group in self.groups)
        base = next((part[0] for part in found if part is not None), None)
        scheme = None if base is None else self._scheme(base)
        return None if scheme is None else scheme.part(tensor)

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        scheme = self._scheme(name)
        return None if scheme is None else scheme.matrix(name, leaves)

    def planned(self, name: str, shape: tuple[int, ...]) -> Format | None:
        scheme = self._scheme(name)
        return None if scheme is None else scheme.planned(name, shape)

    def _scheme(self, matrix: str) -> Scheme | None:
        named = (group.scheme for group in self.groups if group.names(matrix))
        return next(named, None) or next((group.scheme for group in self.groups if ANY in group.targets), None)
