"""What a quantization_config means: the protocol that each method's module fulfils, and a checkpoint's tensors sorted by it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from penstock.planner.contract.given.formats import Format
from penstock.planner.contract.stored.stored_matrix import Leaf, StoredMatrix

EXCLUDING = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules")
"""Keys of quantization_config that list what stays as it was."""
_ROUTERS = re.compile(r"(?:^|\.)(?:gate|router|shared_expert_gate)$")
_OUTER = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)")


class Scheme(Protocol):
    """How one checkpoint's matrices are stored."""

    def part(self, tensor: str) -> tuple[str, str] | None:
        """(matrix, leaf) that the stored ``tensor`` may be a part of, by its name alone. None: of none."""

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        """The matrix that ``leaves``, all tensors with this ``name``, are stored as; None where its ``weight`` is plain. UserError, in one
        line, where a leaf is missing, or has a shape or dtype that does not fit."""

    def planned(self, name: str, shape: tuple[int, ...]) -> Format | None:
        """The format in which it would store the tensor ``name`` of an unquantised model; None leaves it as it is."""


class SortedTensors(NamedTuple):
    """A checkpoint's tensors."""

    matrices: Mapping[str, StoredMatrix]
    """By :attr:`StoredMatrix.name`."""
    plain: Mapping[str, tuple[int, tuple[int, ...], str]]
    """(nbytes, shape, dtype) of each other tensor by its own name. What stands beside a plain weight, as its input's scale, is left out."""


def sort_tensors(tensors: Mapping[str, tuple[int, tuple[int, ...], str]], scheme: Scheme | None) -> SortedTensors:
    """``tensors`` as ``scheme`` stores them; without one all are plain. Raises UserError as :meth:`Scheme.matrix` does."""
    if scheme is None:
        return SortedTensors({}, tensors)
    groups: dict[str, dict[str, Leaf]] = defaultdict(dict)
    plain = {}
    for name, stored in tensors.items():
        part = scheme.part(name)
        if part is None:
            plain[name] = stored
        else:
            groups[part[0]][part[1]] = Leaf(name, *stored)
    matrices = {}
    for name, leaves in groups.items():
        matrix = scheme.matrix(name, leaves)
        if matrix is not None:
            matrices[name] = matrix
        elif "weight" in leaves:
            weight = leaves["weight"]
            plain[weight.tensor] = tensors[weight.tensor]
    return SortedTensors(matrices, plain)


def dotted(tensor: str, leaves: Container[str]) -> tuple[str, str] | None:
    """(``X.weight``, leaf) of a tensor that is called ``X.leaf``."""
    base, _, leaf = tensor.rpartition(".")
    return (f"{base}.weight", leaf) if base and leaf in leaves else None


@dataclass(frozen=True)
class Converted:
    """Which tensors of an unquantised decoder a quantiser converts."""

    excluded: tuple[str, ...] = ()
    """Modules that stay as they were: names or ends of names, ``*`` for any, or ``re:`` and an expression."""
    experts_only: bool = False

    @classmethod
    def of(cls, said: Mapping[str, Any], experts_only: bool = False) -> Converted:
        """By what a quantization_config says."""
        listed: list[Any] = next((said[key] for key in EXCLUDING if isinstance(said.get(key), list)), [])
        return cls(tuple(str(text) for text in listed), experts_only)

    def holds(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the tensor ``name`` of a decoder is converted: the layers' matrices, routers and what is excluded apart."""
        module, expert = name.removesuffix(".weight"), ".experts." in name and len(shape) == 3
        matrix = expert or (name.endswith(".weight") and len(shape) == 2 and not self.experts_only)
        return matrix and ".layers." in f".{name}" and not _ROUTERS.search(module) and not self._excludes.search(_OUTER.sub("", module))

    @cached_property
    def _excludes(self) -> re.Pattern[str]:
        texts = [text[3:] if text.startswith("re:") else _glob(_OUTER.sub("", text)) for text in self.excluded]
        return re.compile("|".join(rf"(?:^|\.)(?:{text})(?:\.|$)" for text in texts) or r"(?!)")


def _glob(text: str) -> str:
    return re.escape(text).replace(r"\*", ".*")
