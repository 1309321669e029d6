"""The readers in C as Python calls them: the compiled library that lies beside their source."""

from __future__ import annotations

import ctypes
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

from penstock.planner.common.errors import UserError

VERSION = 6
"""``READERS_VERSION`` of readers.c."""
REMEDY = "run `pip install -e .` in the sources' directory (it needs a C compiler), or install the package anew"

ENDED, ODD, OVER, TOLD = range(4)
"""Why ``readers_work`` returns."""


class CFile(ctypes.Structure):
    """``struct file``."""

    _fields_ = [("state", ctypes.c_int32)]


class CFact(ctypes.Structure):
    """``struct fact``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("begun_ns", "ended_ns", "bytes", "number", "reader", "offset")),
        ("file", ctypes.c_void_p),
    ]


class ReadersLibrary(NamedTuple):
    """The library twice: to let go of the interpreter's lock and take it again costs more than a short call, and others may keep it."""

    quick: ctypes.PyDLL
    """Its calls keep the interpreter's lock: for functions that wait for nobody."""
    waiting: ctypes.CDLL
    """Its calls run without it."""


def readers_file() -> Path:
    """Where the compiled library of this Python lies, if a compiler made it."""
    return Path(__file__).with_name(f"_readers{sysconfig.get_config_var('EXT_SUFFIX')}")


@cache
def readers_library() -> ReadersLibrary | None:
    """The library; None where no compiler made it. Raises UserError if it cannot be loaded, or was built from another source."""
    path = readers_file()
    if not path.exists():
        return None
    try:
        found = ReadersLibrary(ctypes.PyDLL(str(path)), ctypes.CDLL(str(path)))
        found.quick.readers_version.restype = ctypes.c_int64
        version = found.quick.readers_version()
    except (OSError, AttributeError) as error:
        raise UserError(f"the library of readers cannot be loaded ({error}): {REMEDY}") from None
    if version != VERSION:
        raise UserError(f"{path} was built from other sources: {REMEDY}")
    number, address, numbers = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)
    for name, result, arguments in (
        ("inbox_open", address, []),
        ("inbox_free", None, [address]),
        ("inbox_put", number, [address, number]),
        ("inbox_take", number, [address, numbers, number]),
        ("inbox_wait", number, [address, numbers, number, number, number]),
        ("carrier_open", address, [address] * 10),
        ("carrier_has_word", number, [address]),
        ("carrier_awaits", number, [address]),
        ("carrier_copy", number, [address, address, number, address]),
        ("carrier_close", None, [address]),
        ("carrier_free", None, [address]),
        ("orders_come", number, [address, address, number, number, number]),
        ("readers_open", address, [number, address, number]),
        ("readers_ask", number, [address, address, number, number]),
        ("readers_work", number, [address, number, numbers]),
        ("readers_mended", number, [address, number, number]),
        ("readers_hear", number, [address, ctypes.POINTER(CFact), number]),
        ("readers_close", None, [address]),
        ("readers_stop", None, [address]),
        ("readers_free", None, [address]),
    ):
        for library in found:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return found
