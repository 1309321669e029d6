"""WSM's environment variables (docs/origins.md), read as overrides: an explicit override wins, and a note names those that applied."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from penstock.planner.common.errors import UserError, nearest

PREFIX = "WSM_"


@dataclass(frozen=True)
class Form:
    """How a variable's text and the value of its key say the same: ``planner export to=env`` writes what a solve or a run reads."""

    read: Callable[[str], str | None]
    """None for a text that does not parse."""
    write: Callable[[str], str]
    """The text for a value, or for the nearest one below it that a text can say."""

    def exact(self, value: str) -> bool:
        """Whether a text says just ``value``."""
        return self.read(self.write(value)) == value


def _times(factor: int, least: int = 0) -> Form:
    """Whole numbers of ``factor``, of which a key has ``least`` at least."""
    return Form(lambda text: str(max(least, int(text) * factor)) if text.isdigit() else None, lambda value: str(int(value) // factor))


def _either(on: str, off: str) -> Form:
    """1 or true, 0 or false."""
    words = {"1": on, "true": on, "0": off, "false": off}
    return Form(lambda text: words.get(text.lower()), lambda value: "1" if value == on else "0")


_COUNT = _times(1)
_UNITS = _times(2)
_MEBIBYTES = _times(2**20)
_FLAG = _either("true", "false")


def _never(value: str) -> bool:
    return False


def _on(value: str) -> bool:
    return value == "true"


@dataclass(frozen=True)
class Variable:
    """One variable: the key that it sets, per verb that has a use for it, or why no value of it changes anything."""

    name: str
    form: Form
    allowed: str
    solve: str | None = None
    """Key of `planner solve` and `planner explain`."""
    run: str | None = None
    """Key of `runtime run`."""
    always: str | None = None
    """What is so whatever the value; such a variable sets no key."""
    agrees: Callable[[str], bool] = _never
    """Whether the converted value asks for what is ``always`` so."""

    def convert(self, text: str) -> str | None:
        """The value that ``text`` sets; None when it does not parse."""
        return self.form.read(text)

    def key(self, verb: str) -> str | None:
        return {"solve": self.solve, "explain": self.solve, "run": self.run, "bench": self.solve or self.run}.get(verb)


def _forced(name: str, form: Form, key: str, allowed: str) -> Variable:
    return Variable(PREFIX + name, form, allowed, f"force.{key}", f"force.{key}")


def _engine(name: str, form: Form, key: str, allowed: str) -> Variable:
    return Variable(PREFIX + name, form, allowed, run=f"engine.{key}")


def _constant(name: str, form: Form, allowed: str, always: str, agrees: Callable[[str], bool] = _never) -> Variable:
    return Variable(PREFIX + name, form, allowed, always=always, agrees=agrees)


_LAYERS = "a number of layers"
_SWITCH = "0 or 1"
_NOT_THROTTLED = "KV is not throttled; weights and KV share the link without loss worth one"

TABLE: tuple[Variable, ...] = (
    _forced("CPU_CACHE_CAP_LAYERS", _COUNT, "cap_layers", _LAYERS),
    _forced("CPU_CACHE_HWM_LAYERS", _COUNT, "hwm_layers", _LAYERS),
    _forced("CPU_PREFETCH_DISTANCE", _COUNT, "prefetch_distance", _LAYERS),
    _forced("CPU_ROLLING_MODE", _either("rolling", "pinned"), "policy", _SWITCH),
    _forced("KIND_AHEAD_CAP", _UNITS, "vram_prefetch_distance", "a number of units of one kind"),
    _forced("PAIR_AHEAD", _UNITS, "vram_prefetch_distance", _LAYERS),
    _forced("AGGRESSIVE_GPU_PREFETCH", _UNITS, "vram_prefetch_distance", _LAYERS),
    _forced("MAX_CACHED_LAYERS", _UNITS, "vram_slots", _LAYERS),
    _forced("GPU_MAX_GROUPS", _COUNT, "vram_slots", "a number of groups"),
    _forced("STAGING_MB", _MEBIBYTES, "staging_bytes", "a number of MiB"),
    Variable(PREFIX + "GPU_FREE_GUARD_MB", _MEBIBYTES, "a number of MiB", solve="workload.vram_guard_bytes"),
    Variable(PREFIX + "VERBOSE", _FLAG, _SWITCH, run="verbose"),
    _engine("CPU_WRAP_AROUND", _FLAG, "wrap_around", _SWITCH),
    _engine("SKIP_PRELOAD_WAIT", _either("0", "null"), "warmup_layers", _SWITCH),
    _engine("EVICT_FINISHED", _either("0", "1"), "keep_finished_units", _SWITCH),
    _engine("BALANCE_PREFETCH", _either("1", "null"), "balance_units", _SWITCH),
    _engine("BALANCE_TOL", _times(1, least=1), "balance_units", "a number of units"),
    _constant("CPU_ROLL_SYNC", _FLAG, _SWITCH, "the DRAM window advances with the layer in use", _on),
    _constant("KV_THROTTLE_THRESHOLD", _COUNT, "a number of copies", _NOT_THROTTLED),
    _constant("KV_THROTTLE_MS", _COUNT, "a number of milliseconds", _NOT_THROTTLED),
)
"""Every variable of WSM's documents. A GPU layer there is two units (attention and FFN), a group is one; MB there is MiB. So many units
of each kind ahead are twice as many units ahead. Attention and FFN as close together as they can be are one apart.
Of two variables for one key the later in this table wins."""


@dataclass(frozen=True)
class Environment:
    """What the environment asks of one verb."""

    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    """Key -> ``NAME=text`` of the variable that set it."""

    def credit(self, error: UserError) -> UserError:
        """``error`` with the variables named whose keys it speaks of: nobody typed those keys."""
        said = [f"{key} was set by {origin}" for key, origin in self.origins.items() if re.search(rf"\b{re.escape(key)}\b", str(error))]
        return UserError(f"{error}; {', '.join(said)}") if said else error


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
        if variable.always is not None:
            notes.append(f"{variable.name}={text} {'holds anyway' if variable.agrees(value) else 'is ignored'}: {variable.always}")
        elif key is None:
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
    origins = {key: f"{variable.name}={environ[variable.name]}" for key, (variable, _) in chosen.items()}
    return Environment(tuple(f"{key}={value}" for key, (_, value) in chosen.items()), tuple(notes), origins)
