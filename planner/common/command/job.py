"""The task of a verb inside Hydra: its schema's dataclass, complete, and one line for what a user got wrong. Also for a point of a sweep,
in this process or in one that a launcher started."""

from __future__ import annotations

import functools
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

from penstock.planner.common.closing import Closing
from penstock.planner.common.command.complaints import explain
from penstock.planner.common.command.known_keys import Key
from penstock.planner.common.command.overrides import key_of
from penstock.planner.common.command.sweep_folders import FILES, OUTPUT, POINT, Point, read_points, write_point
from penstock.planner.common.command.sweep_table import point_line, print_points, swept_keys
from penstock.planner.common.command.wsm import Environment
from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import raise_if_interrupted
from penstock.planner.common.origins import BY_HAND
from penstock.planner.common.outside.bounds import check_own_bounds
from penstock.planner.common.outside.card_errors import card_trouble
from penstock.planner.common.outside.starved import starved
from penstock.planner.common.strictly import check_types
from penstock.planner.common.user_folder import profile_dir

LOCAL = "local"
"""The hardware profile of this machine."""

BUG = 1
"""Exit status of a point that ended with an exception that is nobody's mistake but the program's."""


@dataclass
class Call:
    """One invocation of a verb, known to the task that runs inside Hydra."""

    verb: Any
    """A ``penstock.planner.common.command.app.Verb``."""
    program: str
    keys: Mapping[str, Key]
    groups: Mapping[str, tuple[str, ...]]
    typed: list[str]
    environment: Environment = field(default_factory=Environment)
    failed: list[UserError] = field(default_factory=list)
    status: int = 0
    """The highest that a task has returned."""
    besides: Mapping[str, str] = field(default_factory=dict)
    """Group -> what serves where no option of it does."""


_current: ContextVar[Call | None] = ContextVar("call", default=None)


@contextmanager
def calling(call: Call) -> Iterator[None]:
    """Let tasks inside know of ``call``."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def job(task: Callable[[Any], int | None]) -> Callable[[Any], None]:
    """Make the task of a verb from a function of its schema's dataclass, which may return an exit status. A point of a sweep that fails
    does not end it.

    A launcher sends the function to other processes by its value, so that it holds nothing but ``task``.
    """

    @functools.wraps(task)
    def run(cfg: Any) -> None:
        from penstock.planner.common.command.job import run_task

        run_task(task, cfg)

    return run


def run_task(task: Callable[[Any], int | None], cfg: Any) -> None:
    """``task`` with ``cfg`` as its schema's dataclass."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    call = _current.get() or _call_of_worker(task, list(hydra.overrides.task))
    if hydra.mode == RunMode.MULTIRUN:
        _run_point(task, cfg, call, hydra)
        return
    try:
        _run(task, cfg, call, hydra)
    except Exception as error:
        call.failed.append(_mistake(error, call))


def _run_point(task: Callable[[Any], int | None], cfg: Any, call: Call, hydra: Any) -> None:
    """One point of a sweep, which leaves a row whatever becomes of it."""
    number, directory = hydra.job.num, Path(hydra.runtime.output_dir)
    asked = tuple(override for override in hydra.overrides.task if key_of(override) != "notes")
    told = io.StringIO()
    error, status = None, 0
    try:
        with redirect_stdout(told):
            status = _run(task, cfg, call, hydra, directory)
    except Exception as raised:
        try:
            error, status = str(_mistake(raised, call)), 2
        except Exception:
            traceback.print_exc()
            error, status = f"{type(raised).__name__}: {' '.join(str(raised).split())}", BUG
    directory.mkdir(parents=True, exist_ok=True)
    (directory / OUTPUT).write_text(told.getvalue(), encoding="utf-8", errors="backslashreplace")
    left = tuple(os.path.relpath(path) for path in sorted(directory.iterdir()) if path.is_file() and path.name not in (POINT, OUTPUT))
    figures = {} if error is not None else _figures(call.verb, told.getvalue())
    point = Point(f"{call.program} {call.verb.name}", number, asked, status, error, figures, left)
    write_point(directory, point)
    print(point_line(point, swept_keys(call.typed)), file=sys.stdout if error is None else sys.stderr, flush=True)


def _figures(verb: Any, output: str) -> dict[str, Any]:
    """Those that ``verb`` names, of the JSON document that ends its ``output``."""
    try:
        document = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    figures = {}
    for name, path in verb.figures.items():
        value: Any = document
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        figures[name] = value if isinstance(value, str | int | float) else None
    return figures


def _run(task: Callable[[Any], int | None], cfg: Any, call: Call, hydra: Any, directory: Path | None = None) -> int:
    """The files of a sweep's point go into its ``directory``, and its output ends with what it has to say as JSON."""
    config = _complete(cfg, call, hydra.runtime.choices)
    _credit(config, hydra.overrides.task)
    if directory is not None and isinstance(config, Closing):
        config.json = True
    for file in FILES if directory is not None else ():
        section, _, name = file.rpartition(".")
        holder = getattr(config, section, None) if section else config
        if getattr(holder, name, None):
            setattr(holder, name, os.path.relpath(directory / getattr(holder, name)))
    raise_if_interrupted()
    status = task(config) or 0
    call.status = max(call.status, status)
    return status


def _mistake(error: Exception, call: Call) -> UserError:
    """The user's mistake that ``error`` is; anything else is raised again."""
    from omegaconf.errors import OmegaConfBaseException

    raise_if_interrupted()  # a library may have stumbled over the signal, and Hydra would report a job that failed
    mistake = error if isinstance(error, UserError | OmegaConfBaseException) else starved(error) or card_trouble(error)
    if mistake is None:
        raise error
    line = explain(mistake, call.keys, call.typed)
    assert line is not None
    return call.environment.credit(line)


def _call_of_worker(task: Callable[[Any], int | None], overrides: list[str]) -> Call:
    """What the first process knew, found again in one that a launcher started: the program is a module's ``PROGRAM``."""
    import importlib

    program = importlib.import_module(task.__module__).PROGRAM
    return program.call_of(task.__name__, overrides)


def complete(cfg: Any, call: Call) -> Any:
    """The configuration that Hydra composed for ``call``, its own part included, as the verb's dataclass. Raises UserError for the first
    thing that is missing."""
    from omegaconf import open_dict

    hydra = cfg.hydra
    with open_dict(cfg):
        del cfg["hydra"]
    config = _complete(cfg, call, hydra.runtime.choices)
    _credit(config, hydra.overrides.task)
    return config


def _complete(cfg: Any, call: Call, choices: Mapping[str, str | None]) -> Any:
    """``cfg`` as its schema's dataclass. Raises UserError for the first thing that is still missing."""
    from omegaconf import OmegaConf

    missing = OmegaConf.missing_keys(cfg)
    for path in (path for path in call.keys if path in missing):
        group = path.partition(".")[0]
        if group not in call.groups:
            values = call.keys[path].choices
            allowed = f", one of {', '.join(values)}" if values else ""
            raise UserError(f"{path}=... is required{allowed}; see `{call.program} {call.verb.name} --help`")
        if choices.get(group) is None:
            raise UserError(_choose(group, call))
        raise UserError(f"{path} is missing from {group}={choices[group]}; set {path}=..., {call.keys[path].allowed}")
    config: Any = OmegaConf.to_object(cfg)
    if call.verb.instead and getattr(config, call.verb.instead) is None:
        for group in (group for group in call.groups if choices.get(group) is None):
            raise UserError(f"{_choose(group, call)}, or set {call.verb.instead}=")
    config = config if is_dataclass(config) else call.verb.schema(**config)
    check_types(config)
    check_own_bounds(config)
    return config


def _choose(group: str, call: Call) -> str:
    unprobed = group == "hardware" and LOCAL not in call.groups[group]
    first = f"{profile_dir() / 'hardware'} has no profile of this machine: run `planner probe` and " if unprobed else ""
    own = f"{LOCAL}, " if first else ""
    other = f", or {call.besides[group]}" if group in call.besides and not first else ""
    return f"{group} is required; {first}choose {group}= one of {own}{', '.join(call.groups[group])}{other}"


def _credit(config: Any, overrides: list[str]) -> None:
    """Say of a hardware figure that was set by hand that it was: what the profile says of its origin is true no more."""
    for override in overrides:
        group, _, path = key_of(override).partition(".")
        if group == "hardware" and path and not path.startswith("origin"):
            origin = config.hardware.origin
            for covered in [key for key in origin if key.startswith(path + ".")]:
                del origin[covered]
            origin[path] = BY_HAND


class SweepEnd(Callback):
    """What the first process tells at a sweep's end, wherever its points ran: how many failed, and one JSON line with a row for each."""

    def on_multirun_end(self, config: Any, **more: Any) -> None:
        call, directory = _current.get(), Path(config.hydra.sweep.dir)
        points = read_points(directory)
        if call is None or not points:
            return
        failed = [point for point in points if point.error is not None]
        call.status = max(call.status, *(point.status for point in points))
        print_points(points)
        print(
            f"{os.path.relpath(directory)}: {len(points)} points, {len(failed)} failed; what each said is in its {OUTPUT}, "
            f"one page: planner report {os.path.relpath(directory)}"
        )
        rows = [point.as_json() for point in points]
        told = {"sweep": os.path.relpath(directory), "points": len(points), "failed": len(failed), "rows": rows}
        Closing(json=config.get("json")).close(told)
