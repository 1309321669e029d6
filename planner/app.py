"""A command-line program of Hydra verbs, and the one place where Hydra's quirks stop.

A program has verbs, a verb is one ``@hydra.main`` function whose task is wrapped by ``job``: it receives its schema's
dataclass, resolved and complete. Whatever a user gets wrong ends as one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from planner.arguments import arguments, parse
from planner.complaints import explain
from planner.complete import complete_word
from planner.errors import UserError, nearest
from planner.hardware import BY_HAND
from planner.interrupt import Terminated, raise_if_interrupted, terminate_as_interrupt
from planner.keys import Key, keys_of, strip_none
from planner.overrides import Grammar, key_of, normalise, quote
from planner.probe.profile import profile_dir
from planner.sweeps import sweep_directory
from planner.wsm import Environment, read_environment

CONFIG = "pkg://conf"
"""Where Hydra finds the primary configs and the presets: inside the installed package."""

SHELLS = ("bash", "zsh", "fish")

LOCAL = "local"
"""The hardware profile of this machine."""


@dataclass(frozen=True)
class Verb:
    """One verb of a program: its ``@hydra.main`` function (the docstring is the help), schema and a worked example."""

    main: Callable[[], Any]
    schema: type
    example: str
    reads_wsm: bool = False
    word: str | None = None
    """The key that a bare word sets: with ``action``, ``kv list`` is ``kv action=list``."""

    @property
    def name(self) -> str:
        return self.main.__name__

    @property
    def summary(self) -> str:
        return (self.main.__doc__ or "").strip().splitlines()[0]


@dataclass
class _Call:
    """One invocation of a verb, known to the task that runs inside Hydra."""

    verb: Verb
    keys: Mapping[str, Key]
    groups: Mapping[str, tuple[str, ...]]
    typed: list[str]
    environment: Environment = field(default_factory=Environment)
    failed: list[UserError] = field(default_factory=list)
    status: int = 0
    """The highest that a task has returned."""


_call: ContextVar[_Call] = ContextVar("call")


def job(task: Callable[[Any], int | None]) -> Callable[[Any], None]:
    """Make the task of a verb from a function of its schema's dataclass, which may return an exit status. A point of a sweep that fails
    does not end it."""

    @functools.wraps(task)
    def run(cfg: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode
        from omegaconf.errors import OmegaConfBaseException

        call = _call.get()
        hydra = HydraConfig.get()
        sweep = hydra.mode == RunMode.MULTIRUN
        if sweep:
            print(f"[{hydra.job.num}] " + "  ".join(o for o in hydra.overrides.task if key_of(o) != "notes"), flush=True)
        try:
            config = _complete(cfg, call, hydra.runtime.choices)
            _credit(config, hydra.overrides.task)
            if sweep and getattr(config, "out", None):
                config.out = os.path.relpath(os.path.join(hydra.runtime.output_dir, config.out))
            raise_if_interrupted()
            call.status = max(call.status, task(config) or 0)
        except Exception as error:
            raise_if_interrupted()  # a library may have stumbled over the signal, and Hydra would tell of a job that failed
            if not isinstance(error, UserError | OmegaConfBaseException):
                raise
            line = explain(error, call.keys, call.typed)
            assert line is not None
            line = call.environment.credit(line)
            call.failed.append(line)
            if sweep:
                print(f"[{hydra.job.num}] {line}", file=sys.stderr, flush=True)

    return run


def _complete(cfg: Any, call: _Call, choices: Mapping[str, str | None]) -> Any:
    """``cfg`` as its schema's dataclass. Raises UserError for the first thing that is still missing."""
    from omegaconf import OmegaConf

    missing = OmegaConf.missing_keys(cfg)
    for path in (path for path in call.keys if path in missing):
        group = path.partition(".")[0]
        if group not in call.groups:
            choices = call.keys[path].choices
            allowed = f", one of {', '.join(choices)}" if choices else ""
            raise UserError(f"{path}=... is required{allowed}; see `{_program()} {call.verb.name} --help`")
        if choices.get(group) is None:
            first = "run `planner probe` and " if group == "hardware" and LOCAL not in call.groups[group] else ""
            own = f"{LOCAL}, " if first else ""
            raise UserError(f"{group} is required; {first}choose {group}= one of {own}{', '.join(call.groups[group])}")
        raise UserError(f"{path} is missing from {group}={choices[group]}; set {path}=..., {call.keys[path].allowed}")
    config = OmegaConf.to_object(cfg)
    return config if is_dataclass(config) else call.verb.schema(**config)


def _credit(config: Any, overrides: list[str]) -> None:
    """Say of a hardware figure that was set by hand that it was: what the profile says of its origin is true no more."""
    for override in overrides:
        group, _, path = key_of(override).partition(".")
        if group == "hardware" and path and not path.startswith("origin"):
            origin = config.hardware.origin
            for covered in [key for key in origin if key.startswith(path + ".")]:
                del origin[covered]
            origin[path] = BY_HAND


@dataclass(frozen=True)
class Program:
    """A console script: ``planner`` or ``runtime``."""

    name: str
    summary: str
    verbs: tuple[Verb, ...]

    def main(self) -> NoReturn:
        """Run on ``sys.argv`` and exit: 0 or the verb's own status, 2 after the user's mistake, 130 or 143 after SIGINT or SIGTERM. A bug
        keeps its traceback."""
        try:
            with terminate_as_interrupt():
                status = self._dispatch(sys.argv[1:])
                sys.stdout.flush()
        except UserError as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            status = 2
        except Terminated:
            print(f"{self.name}: terminated", file=sys.stderr)
            status = 143
        except KeyboardInterrupt:
            print(f"{self.name}: interrupted", file=sys.stderr)
            status = 130
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 141
        sys.exit(status)

    def _dispatch(self, argv: list[str]) -> int:
        if not argv or argv[0] in ("-h", "--help", "help"):
            self._list_verbs()
            return 0
        if argv[0] == "--version":
            from importlib.metadata import version

            print(f"{self.name} {version('penstock')}")
            return 0
        for flag in ("-sc", "--shell-completion"):
            if flag in argv:
                return self._complete_shell(argv[argv.index(flag) :])
        verb = next((v for v in self.verbs if v.name == argv[0]), None)
        if verb is None:
            names = [v.name for v in self.verbs]
            raise UserError(f"{argv[0]}: the first argument is a verb, one of {', '.join(names)}{nearest(argv[0], names)}")
        return _run(verb, parse(argv[1:]))

    def _list_verbs(self) -> None:
        print(f"{self.name} {self.summary}\n")
        for verb in self.verbs:
            print(f"  {self.name} {verb.name:<8} {verb.summary}")
        print(f"\n`{self.name} VERB --help` shows a verb's keys; set one with key=value.")
        print(f'Shell completion: eval "$({self.name} -sc install=bash)" (or zsh, fish).')

    def _complete_shell(self, argv: list[str]) -> int:
        """Install a shell's completion (Hydra knows how), or answer its request: verbs first, then what the verb accepts."""
        action, _, shell = (argv[1] if len(argv) == 2 else "").partition("=")
        if action not in ("install", "uninstall", "query") or shell not in SHELLS:
            raise UserError(f"{' '.join(argv)}: use {argv[0]} install=SHELL or uninstall=SHELL, with a shell of {', '.join(SHELLS)}")
        if action != "query":
            _enter_hydra(_Call(self.verbs[0], {}, {}, []), ["--shell-completion", argv[1]])
            return 0
        _, _, line = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
        name, space, rest = line.lstrip().partition(" ")
        answers = [v.name for v in self.verbs if v.name.startswith(name)]
        if space:
            verb = next((v for v in self.verbs if v.name == name), None)
            answers = complete_word(rest.rpartition(" ")[2], _grammar(verb, multirun=True), verb.word) if verb else []
        print(("\n" if shell == "fish" else " ").join(answers))
        return 0


def _program() -> str:
    return os.path.basename(sys.argv[0])


def _run(verb: Verb, args: argparse.Namespace) -> int:
    """Run one verb; its status, or 2 when a point of a sweep failed. Raises UserError for everything that the user can mend."""
    multirun = bool(args.multirun) or any(o.replace(" ", "").upper() == "HYDRA.MODE=MULTIRUN" for o in args.overrides)
    grammar = _grammar(verb, multirun, args.config_dir)
    if args.help:
        from planner.help import print_help

        print_help(_program(), verb.name, (verb.main.__doc__ or "").strip(), verb.example, verb.schema, grammar)
        return 0
    typed = _spelled_out(args.overrides, verb.word)
    overrides = [normalise(override, grammar) for override in typed]
    explicit = {key_of(o) for o in overrides}
    environment = read_environment(os.environ, verb.name, explicit) if verb.reads_wsm else Environment()
    overrides = [*_implied(grammar, environment, explicit), *overrides]
    if profile_dir().is_dir():
        if args.config_dir is None:
            args.config_dir = str(profile_dir())
        elif "hydra.searchpath" not in [key_of(o) for o in overrides]:
            overrides.append(f"hydra.searchpath=[{quote('file://' + str(profile_dir()))}]")
    with sweep_directory(multirun and "hydra.sweep.dir" not in [key_of(o) for o in overrides]) as sweep:
        call = _Call(verb, grammar.keys, {g: tuple(options) for g, options in grammar.groups.items()}, typed, environment)
        _enter_hydra(call, arguments(args, overrides + sweep))
    if call.failed and not multirun:
        raise call.failed[0]
    return 2 if call.failed else call.status


def _spelled_out(overrides: list[str], word: str | None) -> list[str]:
    """``overrides`` with the first bare word as the value of the key ``word``."""
    bare = next((i for i, override in enumerate(overrides) if word and "=" not in override and not override.startswith("~")), None)
    return [f"{word}={override}" if i == bare else override for i, override in enumerate(overrides)]


def _enter_hydra(call: _Call, line: list[str]) -> None:
    """Hand the command line ``line`` to the verb's ``@hydra.main``, with every exception coming out as it was raised."""
    from hydra.core.config_store import ConfigStore

    store, hints = ConfigStore.instance(), get_type_hints(call.verb.schema)
    store.store(name=f"{call.verb.name}_schema", node=call.verb.schema)
    for group in call.groups:
        store.store(group=group, name="schema", node=strip_none(hints[group])[0])
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [sys.argv[0], *line]
    token = _call.set(call)
    try:
        call.verb.main()
    except Exception as error:
        mistake = explain(error, call.keys, call.typed)
        if mistake is None:
            raise
        raise mistake from error
    finally:
        _call.reset(token)


def _implied(grammar: Grammar, environment: Environment, explicit: set[str]) -> list[str]:
    """Overrides that nobody typed: this machine's own profile, and what the environment asks for."""
    overrides = []
    if LOCAL in grammar.groups.get("hardware", ()) and "hardware" not in explicit:
        overrides.append(f"hardware={LOCAL}")
    overrides += environment.overrides
    if environment.notes:
        overrides.append(f"notes=[{','.join(quote(note, literal=True) for note in environment.notes)}]")
    return overrides


def _grammar(verb: Verb, multirun: bool, config_dir: str | None = None) -> Grammar:
    """What ``verb`` accepts here: its schema's keys, the presets, and the profiles in the user's config directory."""
    directories: list[Any] = [resources.files("conf"), profile_dir()]
    if config_dir is not None:
        if not os.path.isdir(config_dir):
            raise UserError(f"--config-dir={config_dir}: no such directory")
        directories.append(Path(config_dir))
    groups = {}
    for entry in fields(verb.schema):
        if directories[0].joinpath(entry.name).is_dir():
            groups[entry.name] = sorted({o for directory in directories for o in _options(directory.joinpath(entry.name))})
    return Grammar(keys_of(verb.schema), groups, multirun, _absent)


def _options(directory: Any) -> Iterator[str]:
    if directory.is_dir():
        yield from (file.name.removesuffix(".yaml") for file in directory.iterdir() if file.name.endswith(".yaml"))


def _absent(group: str, option: str) -> str | None:
    if (group, option) == ("hardware", LOCAL):
        return f"this machine has no measured profile in {profile_dir()}; run `planner probe` first"
    return None
