"""The keys of a configuration schema: their types, defaults and docstrings, for checking, completing and helping."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.abc import InspectLoader
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from penstock.planner.common.errors import nearest

DECLARED_AT = "declared_at"
"""In a field's metadata: (dataclass, field) that declare it, where that is another one."""


@dataclass(frozen=True)
class Key:
    """One leaf of a schema. ``kind`` is its type without None; ``path`` is dotted."""

    path: str
    kind: Any
    optional: bool
    default: Any
    owner: type
    """The dataclass that declares it,"""
    field: str
    """by this name, with its docstring."""
    literal: bool
    """Free text: ``${...}`` means itself."""
    within: str | None
    """The nearest section around the key that may be null."""
    open: bool = False
    """It holds keys that no schema knows."""

    @property
    def is_size(self) -> bool:
        return self.path.endswith("_bytes") and self.kind is int

    @property
    def is_whole(self) -> bool:
        return self.kind is int

    @property
    def is_text(self) -> bool:
        return self.kind is str

    @property
    def is_text_list(self) -> bool:
        return self.kind == list[str]

    @property
    def is_number_list(self) -> bool:
        return self.kind == list[int]

    @property
    def is_dict(self) -> bool:
        return self.open or self.names_its_own

    @property
    def names_its_own(self) -> bool:
        """A mapping of names that no schema knows."""
        return get_origin(self.kind) is dict

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of an enumeration or a boolean; empty for everything else."""
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return tuple(self.kind.__members__)
        return ("true", "false") if self.kind is bool else ()

    @property
    def allowed(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            words = "one of " + ", ".join(self.choices)
        elif self.is_size:
            words = "a size such as 6GiB, 16GB or 4096"
        else:
            names = {int: "a whole number", float: "a number", str: "text"}
            names |= {Any: "false, or keys of its own", list[str]: "a list such as [a, b]", list[int]: "whole numbers such as [2, 4]"}
            names |= {dict[str, float]: "numbers by name such as {FP8: 10.5}", dict[str, int]: "whole numbers by name such as {FP8: 10}"}
            names |= {dict[str, list[list[Any]]]: "rows by name such as {FP8: [[1, 10.5]]}"}
            words = names.get(self.kind, "a list of rows such as [[1048576, 2.1]]")
        return f"{words}, or null" if self.optional else words

    @property
    def doc(self) -> str:
        """The docstring under its field."""
        return field_docs(self.owner.__module__).get((self.owner.__name__, self.field), "")

    @property
    def shown_default(self) -> str:
        if self.default is None or isinstance(self.default, bool):
            return {None: "null", True: "true", False: "false"}[self.default]
        if self.is_size and isinstance(self.default, int) and self.default >= 2**20:
            return f"{self.default / 2**20:g}MiB"
        return getattr(self.default, "value", None) or str(self.default)


def known_at(path: str, keys: Mapping[str, Key]) -> Key | None:
    """The key ``path``, or the mapping of which it is one name; None where no schema knows it."""
    holder = keys.get(path.rpartition(".")[0])
    return keys.get(path, holder if holder is not None and holder.names_its_own else None)


def strip_none(hint: Any) -> tuple[Any, bool]:
    """A type hint without None, and whether it had it."""
    if get_origin(hint) in (Union, UnionType):
        rest = [arg for arg in get_args(hint) if arg is not NoneType]
        return rest[0], len(rest) < len(get_args(hint))
    return hint, False


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _declaring(schema: type, name: str) -> type:
    """The dataclass among ``schema`` and its bases that declares the field ``name``."""
    return next((base for base in schema.__mro__ if name in base.__dict__.get("__annotations__", {})), schema)


def keys_of(schema: type, prefix: str = "", within: str | None = None) -> dict[str, Key]:
    """Every leaf of the dataclass ``schema`` by its dotted path, in the order of definition; what it inherits comes last. Fields that the
    program fills in itself, whose metadata says ``internal``, are no keys."""
    found: dict[str, Key] = {}
    hints = get_type_hints(schema)
    for field in sorted(dataclasses.fields(schema), key=lambda field: field.name not in schema.__annotations__):
        kind, optional = strip_none(hints[field.name])
        path = prefix + field.name
        if field.metadata.get("internal"):
            continue
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= keys_of(kind, path + ".", path if optional else within)
        else:
            owner, name = field.metadata.get(DECLARED_AT, (_declaring(schema, field.name), field.name))
            found[path] = Key(
                path,
                kind,
                optional,
                _default(field),
                owner,
                name,
                bool(field.metadata.get("literal")),
                within,
                bool(field.metadata.get("open")),
            )
    return found


def sections_of(keys: Mapping[str, Key]) -> set[str]:
    """The dotted paths that hold other keys."""
    return {path.rsplit(".", n)[0] for path in keys for n in range(1, path.count(".") + 1)}


def unknown_key(key: str, keys: Iterable[str]) -> str:
    """Why ``key`` is refused: what exists beside it, and the nearest spelling of a whole key."""
    keys = list(keys)
    parent = key.rpartition(".")[0]
    while parent and not any(path.startswith(parent + ".") for path in keys):
        parent = parent.rpartition(".")[0]
    start = parent + "." if parent else ""
    beside = dict.fromkeys(path[len(start) :].split(".")[0] for path in keys if path.startswith(start))
    same_leaf = [path for path in keys if path.rpartition(".")[2] == key.rpartition(".")[2]]
    meant = f"; did you mean {same_leaf[0]}?" if same_leaf else nearest(key, keys)
    return f"no such key; {parent or 'there'} {'has' if parent else 'are'} {', '.join(beside)}{meant}"


@cache
def field_docs(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the docstring under the field, first sentence, read from ``module``'s source."""
    spec = importlib.util.find_spec(module)
    source = spec.loader.get_source(module) if spec and isinstance(spec.loader, InspectLoader) else None
    docs: dict[tuple[str, str], str] = {}
    for node in ast.parse(source or "").body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
                docs[node.name, field.target.id] = " ".join(text.split())
    return docs
