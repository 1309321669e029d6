"""Nested mappings into dataclasses, strictly: every key known, present and of its type, or one line that names it."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from penstock.planner.common.errors import UserError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def build(cls: type[T], data: Any, where: str) -> T:
    """An instance of the dataclass ``cls`` from ``data``. Raises UserError naming ``where`` and the dotted key."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: must be a mapping of {', '.join(f.name for f in dataclasses.fields(cls))}, not {_brief(data)}")
    hints = get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in known:
            raise UserError(f"{where}.{_brief(key)}: no such key; {where} has {', '.join(known)}{nearest(str(key), known)}")
    values = {}
    for name, field in known.items():
        if name in data:
            values[name] = convert(hints[name], data[name], f"{where}.{name}")
        elif dataclasses.is_dataclass(hints[name]):
            values[name] = field.default if _is_given(field.default) else build(hints[name], {}, f"{where}.{name}")
        elif not _is_given(field.default) and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}.{name}: missing; {where} has {', '.join(known)}")
    return cls(**values)


def check_types(value: Any, where: str = "") -> None:
    """UserError for the first field of the dataclass ``value`` that holds something of another type, as an interpolation may put there."""
    hints = get_type_hints(type(value))
    for field in dataclasses.fields(value):
        one, name = getattr(value, field.name), f"{where}{field.name}"
        if dataclasses.is_dataclass(one):
            check_types(one, f"{name}.")
        elif not isinstance(one, Enum):
            convert(hints[field.name], one, name)


def convert(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the type ``hint``. Raises UserError naming ``where``."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in args:
            return None
        return convert(next(arg for arg in args if arg is not NoneType), value, where)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            check_types(value, f"{where}.")
            return value
        return build(hint, value, where)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise UserError(f"{where}: must be a list, not {_brief(value)}")
        inner = args[0] if len(set(args) - {Ellipsis}) == 1 else None
        if inner is None and len(value) != len(args):
            raise UserError(f"{where}: must be a list of {len(args)}, not {_brief(value)}")
        kinds = [inner] * len(value) if inner is not None else list(args)
        return origin(convert(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: must be a mapping, not {_brief(value)}")
        return {convert(args[0], k, where): convert(args[1], v, f"{where}.{k}") for k, v in value.items()}
    return value if hint is Any else _scalar(hint, value, where)


def _scalar(hint: type, value: Any, where: str) -> Any:
    if issubclass(hint, Enum):
        names = [member.value for member in hint]
        if value not in names:
            raise UserError(f"{where}={_brief(value)}: must be one of {', '.join(names)}{nearest(str(value), names)}")
        return hint(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is hint:
        return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise UserError(f"{where}={_brief(value)}: must be {words.get(hint, hint.__name__)}")


def _is_given(default: Any) -> bool:
    """Whether a field has a default: ``MISSING`` of a configuration's schema is none."""
    return default is not dataclasses.MISSING and default != MISSING


def _brief(value: Any) -> str:
    """``value`` in a line, however long or deep it is."""
    return value if isinstance(value, str) and len(value) <= 60 else reprlib.repr(value)
