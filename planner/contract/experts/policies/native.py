"""mix.c and far.c as Python calls them: the compiled library that lies beside them, or numpy in its place."""

from __future__ import annotations

import ctypes
import sysconfig
from functools import cache
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.policies.uncompiled import Uncompiled

REMEDY = "run `pip install -e .` in the sources' directory (it needs a C compiler), or install the package anew"


class MixState(ctypes.Structure):
    """``struct mix``: sizes, constants, and the addresses of arrays, which whoever fills it in has to keep."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("layers", "count", "top_k", "near", "far", "rates", "further")),
        *((name, ctypes.c_float) for name in ("floor", "due_later", "least_score", "keep_rate", "fetch_rate", "weight_rate")),
        ("share", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("gain", "tables", "weights", "squares", "often", "odds", "worth", "foreseen")),
        *((name, ctypes.c_void_p) for name in ("keep_error", "fetch_error", "features", "rows", "path", "learnt", "latest", "follows")),
    ]


class FarState(ctypes.Structure):
    """``struct far``, likewise."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("layers", "count", "top_k", "reach")),
        ("least", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("visits", "right", "told", "held", "names")),
    ]


def library_path() -> Path:
    """Where the compiled library of this Python lies, if a compiler made it."""
    return Path(__file__).with_name(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")


def unbuilt(name: ExpertPolicyName | None) -> str | None:
    """What the policy ``name`` lacks here, and what mends it; None if it lacks nothing."""
    if name not in (ExpertPolicyName.mix, ExpertPolicyName.lookahead) or library_path().exists():
        return None
    return f"the policy {name} is not compiled here: numpy decides, about 0.1 ms a layer, which is not predicted; {REMEDY}"


@cache
def library() -> ctypes.PyDLL | Uncompiled:
    """The compiled library; :class:`Uncompiled` where none was built. It keeps the interpreter's lock while it computes, because to
    release and take it again costs more. Its functions get ints, None and :func:`ctypes.byref` or ``c_void_p`` objects that are made
    once. They have no ``argtypes``, whose conversions would take a third of a call. Raises UserError if the library cannot be loaded, or
    was built from other sources."""
    path = library_path()
    if not path.exists():
        return Uncompiled()
    try:
        found = ctypes.PyDLL(str(path))
    except OSError as error:
        raise UserError(f"the library of the policies mix and lookahead cannot be loaded ({error}): {REMEDY}") from None
    for name, state in (("mix", MixState), ("far", FarState)):
        size = getattr(found, f"{name}_bytes")
        size.restype = ctypes.c_size_t
        if size() != ctypes.sizeof(state):
            raise UserError(f"{path} was built from another version of {name}.c: {REMEDY}")
    return found
