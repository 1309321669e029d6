"""The products in C as Python calls them: the compiled library that lies beside their sources."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType

from penstock.planner.common.errors import UserError

VERSION = 12
"""``PRODUCTS_VERSION`` of products.h."""
MOST_PARTS = 5
"""Of a matrix."""
REMEDY = "run `pip install -e .` in the sources' directory (it needs a C compiler), or install the package anew"


class Level(IntEnum):
    """Instruction sets that products are written for, each with those before it; ``enum level`` of products.h."""

    portable = 0
    avx2 = 1
    avx512 = 2
    avx512_bf16 = 3
    amx = 4


class CMatrix(ctypes.Structure):
    """``struct matrix``."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("part", ctypes.c_void_p * MOST_PARTS),
    ]


class CUnit(ctypes.Structure):
    """``struct unit``."""

    _fields_ = [
        ("form", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("number", ctypes.c_int32),
        ("gate", CMatrix),
        ("up", CMatrix),
        ("down", CMatrix),
        ("bias", ctypes.c_void_p * 3),
        ("bytes", ctypes.c_int64),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    ]


class CAttend(ctypes.Structure):
    """``struct attend``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "out", "firsts", "starts", "counts", "pages", "sinks", "slopes")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "key_dim", "value_dim")),
        *((f"{states}_{step}", ctypes.c_int64) for states in "qkvo" for step in ("token", "head")),
        *((name, ctypes.c_int64) for name in ("table_row", "page_tokens", "window", "most_keys")),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("new_keys", "new_values", "places")),
    ]


def products_file() -> Path:
    """Where the compiled library of this Python lies, if a compiler made it."""
    return Path(__file__).with_name("native") / f"_products{sysconfig.get_config_var('EXT_SUFFIX')}"


def products_unbuilt() -> str | None:
    """What lacks where no compiler made the library, and what mends it; None where it is there."""
    return None if products_file().exists() else f"products are not compiled here: the CPU computes no unit beside the card; {REMEDY}"


@cache
def products_library() -> ctypes.CDLL:
    """The library. Its calls run without the interpreter's lock. Raises UserError if it is not there, or was built from other sources."""
    if said := products_unbuilt():
        raise UserError(said)
    path = products_file()
    try:
        found = ctypes.CDLL(str(path))
        found.products_version.restype = ctypes.c_int64
        version = found.products_version()
    except (OSError, AttributeError) as error:
        raise UserError(f"the library of products cannot be loaded ({error}): {REMEDY}") from None
    if version != VERSION:
        raise UserError(f"{path} was built from other sources: {REMEDY}")
    number, address, numbers = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)
    unit = ctypes.POINTER(CUnit)
    for name, result, arguments in (
        ("kind_name", ctypes.c_char_p, [number]),
        ("kind_reads_ahead", number, [number]),
        ("machine_level", ctypes.c_int, []),
        ("pool_open", address, [number, numbers, number, number, number]),
        ("pool_do", number, [address, unit, number, address, address]),
        ("pool_attend", number, [address, ctypes.POINTER(CAttend)]),
        ("pool_attend_asked", number, [address, ctypes.POINTER(CAttend), address, address, number, address]),
        ("pool_start", number, [address, unit, number, address, address, address, number]),
        ("pool_wait", None, [address, number]),
        ("pool_step", number, [address, address, number]),
        ("pool_abandon", None, [address, address]),
        ("pool_rest", None, [address]),
        ("pool_near", None, [address, number]),
        ("pool_tell", None, [address, numbers]),
        ("looker_open", address, [address]),
        ("looker_step", None, [address, address, number]),
        ("looker_abandon", None, [address, address]),
        ("looker_rest", None, [address]),
        ("looker_close", None, [address]),
        ("served_open", address, [number, unit, number, address, address, address, address, address, numbers]),
        ("served_over", number, [address]),
        ("served_tell", None, [address, numbers]),
        ("served_close", None, [address]),
        ("pool_close", None, [address]),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


@cache
def matrix_kinds() -> Mapping[str, int]:
    """Name of each kind of matrix that the library multiplies -> its number there."""
    library, kinds = products_library(), dict[str, int]()
    while name := library.kind_name(len(kinds)):
        kinds[name.decode()] = len(kinds)
    return MappingProxyType(kinds)


def machine_level() -> Level:
    """The widest instruction set of this machine that there are products for, up to what ATEN_CPU_CAPABILITY leaves to torch's own."""
    found = Level(products_library().machine_level())
    return min(found, _UP_TO.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), found))


def kinds_read_ahead() -> frozenset[str]:
    """Kinds of matrices whose rows lie by themselves, so that threads read ahead of them; the law of plans counts on it
    (``planner.contract.prices.beside.Beside.ahead_s``)."""
    return frozenset(name for name, number in matrix_kinds().items() if products_library().kind_reads_ahead(number))


_UP_TO = MappingProxyType({"default": Level.portable, "avx2": Level.avx2, "avx512": Level.avx512})
