"""The seeds' WSM environment variables, read as overrides: an explicit override wins, and a note says which applied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from planner.errors import UserError, nearest

PREFIX = "WSM_"


def _count(text: str) -> str | None:
    return text if text.isdigit() else None


def _units(text: str) -> str | None:
    return str(2 * int(text)) if text.isdigit() else None


def _mebibytes(text: str) -> str | None:
    return str(int(text) * 2**20) if text.isdigit() else None


def _switch(text: str) -> str | None:
    return {"1": "true", "true": "true", "0": "false", "false": "false"}.get(text.lower())


def _rolling(text: str) -> str | None:
    return {"true": "rolling", "false": "pinned"}.get(_switch(text) or "")


@dataclass(frozen=True)
class Variable:
    """One variable: the key that it sets, per verb that has a use for it, and how its text becomes the key's value."""

    name: str
    convert: Callable[[str], str | None]
    """None for a value that does not parse."""
    allowed: str
    solve: str | None = None
    """Key of `planner solve`."""
    run: str | None = None
    """Key of `runtime run`."""

    def key(self, verb: str) -> str | None:
        return {"solve": self.solve, "run": self.run}.get(verb)


def _forced(name: str, convert: Callable[[str], str | None], key: str, allowed: str) -> Variable:
    return Variable(PREFIX + name, convert, allowed, f"force.{key}", f"force.{key}")


def _engine(name: str, convert: Callable[[str], str | None], key: str, allowed: str) -> Variable:
    return Variable(PREFIX + name, convert, allowed, run=f"engine.{key}")


_LAYERS = "a number of layers"
_SWITCH = "0 or 1"

TABLE: tuple[Variable, ...] = (
    _forced("CPU_CACHE_CAP_LAYERS", _count, "cap_layers", _LAYERS),
    _forced("CPU_CACHE_HWM_LAYERS", _count, "hwm_layers", _LAYERS),
    _forced("CPU_PREFETCH_DISTANCE", _count, "prefetch_distance", _LAYERS),
    _forced("CPU_ROLLING_MODE", _rolling, "policy", _SWITCH),
    _forced("AGGRESSIVE_GPU_PREFETCH", _units, "vram_prefetch_distance", _LAYERS),
    _forced("MAX_CACHED_LAYERS", _units, "vram_slots", _LAYERS),
    _forced("GPU_MAX_GROUPS", _count, "vram_slots", "a number of groups"),
    _forced("STAGING_MB", _mebibytes, "staging_bytes", "a number of MiB"),
    Variable(PREFIX + "GPU_FREE_GUARD_MB", _mebibytes, "a number of MiB", solve="workload.vram_guard_bytes"),
    Variable(PREFIX + "VERBOSE", _switch, _SWITCH, run="verbose"),
    _engine("CPU_WRAP_AROUND", _switch, "wrap_around", _SWITCH),
    _engine("CPU_ROLL_SYNC", _switch, "roll_sync", _SWITCH),
    _engine("SKIP_PRELOAD_WAIT", _switch, "skip_preload_wait", _SWITCH),
    _engine("EVICT_FINISHED", _switch, "evict_finished", _SWITCH),
    _engine("KV_THROTTLE_THRESHOLD", _count, "kv_throttle_threshold", "a number of copies"),
    _engine("KV_THROTTLE_MS", _count, "kv_throttle_ms", "a number of milliseconds"),
    _engine("BALANCE_PREFETCH", _switch, "balance_prefetch", _SWITCH),
    _engine("BALANCE_TOL", _count, "balance_tolerance", "a number of units"),
    _engine("PAIR_AHEAD", _count, "pair_ahead", "a number of layers"),
    _engine("KIND_AHEAD_CAP", _count, "kind_ahead_cap", "a number of units"),
)
"""Every variable that the seeds name. A seeds' GPU layer is two units (attention and FFN), a group is one; MB there is MiB.
Of two variables for one key the later in this table wins."""


@dataclass(frozen=True)
class Environment:
    """What the environment asks of one verb."""

    overrides: tuple[str, ...]
    notes: tuple[str, ...]


def read_environment(environ: Mapping[str, str], verb: str, explicit: Collection[str]) -> Environment:
    """The overrides that the WSM variables in ``environ`` mean for ``verb``, where ``explicit`` keys were set by hand.

    Raises UserError for a value that does not parse.
    """
    chosen: dict[str, tuple[Variable, str]] = {}
    notes: list[str] = []
    for variable in TABLE:
        text = environ.get(variable.name)
        if text is None:
            continue
        value = variable.convert(text.strip())
        if value is None:
            raise UserError(f"{variable.name}={text}: must be {variable.allowed}; unset the variable or correct it")
        key = variable.key(verb)
        if key is None:
            notes.append(f"{variable.name}={text} has no use in this verb")
        elif key in explicit:
            notes.append(f"{variable.name}={text} gave way to an explicit {key}")
        else:
            if key in chosen:
                earlier = chosen[key][0].name
                notes.append(f"{earlier}={environ[earlier]} gave way to {variable.name}")
            chosen[key] = (variable, value)
    for key, (variable, value) in chosen.items():
        notes.append(f"{variable.name}={environ[variable.name]} applied as {key}={value}")
    known = [variable.name for variable in TABLE]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            notes.append(f"{name} is not a known WSM variable{nearest(name, known)}")
    return Environment(tuple(f"{key}={value}" for key, (_, value) in chosen.items()), tuple(notes))
