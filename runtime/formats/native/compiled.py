"""The decoders in C as Python calls them: the compiled library that lies beside their sources."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from penstock.planner.common.errors import UserError

VERSION = 1
"""``FORMATS_VERSION`` of rows.h."""
REMEDY = "run `pip install -e .` in the sources' directory (it needs a C compiler), or install the package anew"

Function = Callable[..., int]
"""Gets tensors, whose first bytes' addresses the C function gets, ints, and None for no address; returns what the C function does, 0 where
that is nothing."""


def library_file() -> Path:
    """Where the compiled library of this Python lies, if a compiler made it."""
    return Path(__file__).with_name(f"_decoders{sysconfig.get_config_var('EXT_SUFFIX')}")


def uncompiled() -> str | None:
    """What lacks where no compiler made the library, and what mends it; None where it is there."""
    return None if library_file().exists() else f"decoders are not compiled here: torch decodes in their place, slower; {REMEDY}"


@cache
def _library() -> ctypes.CDLL | None:
    path = library_file()
    if not path.exists():
        return None
    try:
        found = ctypes.CDLL(str(path))
        found.formats_version.restype = ctypes.c_int64
        version = found.formats_version()
    except (OSError, AttributeError) as error:
        raise UserError(f"the library of the formats' decoders cannot be loaded ({error}): {REMEDY}") from None
    if version != VERSION:
        raise UserError(f"{path} was built from other sources: {REMEDY}")
    return found


@cache
def compiled(name: str) -> Function | None:
    """The function ``name`` of the library, which runs without the interpreter's lock on as many threads as torch's own products; None
    where no compiler made the library, and torch has to do it.

    Tensors must be contiguous, on the CPU, and as large as the C function's comment says: it checks nothing. Its last argument, the number
    of threads, is added here. Raises UserError if the library cannot be loaded, or was built from other sources.
    """
    library = _library()
    if library is None:
        return None
    try:
        function = library[name]
    except AttributeError:
        raise UserError(f"{library_file()} has no {name}, so it was built from other sources: {REMEDY}") from None
    function.restype = ctypes.c_int64

    def call(*given: torch.Tensor | int | None) -> int:
        return function(*(_argument(one) for one in given), ctypes.c_int64(torch.get_num_threads()))

    return call


def compiled_for(name: str, out: torch.Tensor, *dtypes: torch.dtype) -> Function | None:
    """:func:`compiled`, where ``out`` lies on the CPU and is of one of ``dtypes``, which the function writes; else None."""
    return compiled(name) if out.device.type == "cpu" and out.dtype in dtypes else None


def _argument(given: torch.Tensor | int | None) -> ctypes.c_void_p | ctypes.c_int64:
    if given is None:
        return ctypes.c_void_p()
    if isinstance(given, int):
        return ctypes.c_int64(given)
    if not given.is_contiguous() or given.device.type != "cpu":
        raise ValueError(f"a tensor of strides {given.stride()} on {given.device} is no plain memory")
    return ctypes.c_void_p(given.data_ptr())
