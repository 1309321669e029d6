"""A command-line program of Hydra verbs, and the one place where Hydra's quirks stop.

A program has verbs, a verb is one ``@hydra.main`` function whose task is wrapped by ``job``: it receives its schema's
dataclass, resolved and complete. Whatever a user gets wrong ends as one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_type_hints

from penstock.planner.common.command.arguments import arguments, parse
from penstock.planner.common.command.complaints import explain
from penstock.planner.common.command.completion import complete_word
from penstock.planner.common.command.hydra_mode import mode_by_flag
from penstock.planner.common.command.job import LOCAL, Call, calling, complete
from penstock.planner.common.command.job import job as job
from penstock.planner.common.command.known_keys import strip_none
from penstock.planner.common.command.overrides import Grammar, key_of, normalise, quote
from penstock.planner.common.command.sweep_folders import check_files, check_launcher, death_of_worker, sweep_directory
from penstock.planner.common.command.verb import CONFIG as CONFIG
from penstock.planner.common.command.verb import Verb as Verb
from penstock.planner.common.command.verb import grammar_of, own_profiles, spelled_out
from penstock.planner.common.command.wsm import Environment, read_environment
from penstock.planner.common.errors import UserError, nearest
from penstock.planner.common.interrupt import LEFT_BY_READER, Terminated, terminate_as_interrupt
from penstock.planner.common.outside.installed import installed_version
from penstock.planner.common.outside.starved import starved
from penstock.planner.common.outside.streams import shortened, tell
from penstock.planner.common.user_folder import profile_dir

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Program:
    """A console script: ``planner`` or ``runtime``."""

    name: str
    summary: str
    verbs: tuple[Verb, ...]

    def main(self) -> NoReturn:
        """Run on ``sys.argv`` and exit: 0 or the verb's own status, 2 after the user's mistake or for want of memory, 130, 143 or 129
        after SIGINT, SIGTERM or SIGHUP. A bug keeps its traceback."""
        try:
            with terminate_as_interrupt():
                _check_process(sys.argv)
                status = self._dispatch(sys.argv[1:])
                sys.stdout.flush()
        except UserError as error:
            tell(f"{self.name}: {shortened(str(error))}")
            status = 2
        except Terminated as ended:
            tell(f"{self.name}: {ended.word}")
            status = ended.status
        except KeyboardInterrupt:
            tell(f"{self.name}: interrupted")
            status = 130
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = LEFT_BY_READER
        except Exception as error:
            mistake = starved(error)
            if mistake is None:
                raise
            tell(f"{self.name}: {mistake}")
            status = 2
        sys.exit(status)

    def _dispatch(self, argv: list[str]) -> int:
        if not argv or argv[0] in ("-h", "--help", "help"):
            self._list_verbs()
            return 0
        if argv[0] == "--version":
            print(f"{self.name} {installed_version('penstock') or 'of a source tree that is not installed'}")
            return 0
        for flag in ("-sc", "--shell-completion"):
            if flag in argv:
                return self._complete_shell(argv[argv.index(flag) :])
        verb = next((v for v in self.verbs if v.name == argv[0]), None)
        if verb is None:
            names = [v.name for v in self.verbs]
            raise UserError(f"{argv[0]}: the first argument is a verb, one of {', '.join(names)}{nearest(argv[0], names)}")
        return _run(verb, parse(argv[1:]))

    def call_of(self, verb: str, typed: list[str]) -> Call:
        """The call of ``verb`` in a process that a launcher started for one point of a sweep."""
        found = next(v for v in self.verbs if v.name == verb)
        return _call(found, grammar_of(found, multirun=False), typed, Environment(), self.name)

    def configuration(self, verb: str, typed: Sequence[str]) -> Any:
        """What ``verb`` is given when ``typed`` is on its command line, for a caller in this process: its schema's dataclass, complete.
        Raises UserError as the program prints it. Leaves a Hydra application around it as it was."""
        from hydra import compose, initialize_config_module
        from hydra.core.global_hydra import GlobalHydra

        found = next(v for v in self.verbs if v.name == verb)
        call, overrides = _read(found, grammar_of(found, multirun=False), list(typed), self.name)
        if "hydra.searchpath" not in [key_of(o) for o in overrides]:
            overrides += own_profiles()
        _store_schemas(call)
        around = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            with initialize_config_module(CONFIG.removeprefix("pkg://"), version_base="1.3"):
                return complete(compose(verb, overrides, return_hydra_config=True), call)
        except Exception as error:
            mistake = explain(error, call.keys, call.typed)
            if mistake is None:
                raise
            raise mistake from error
        finally:
            GlobalHydra.instance().hydra = around

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
            _enter_hydra(Call(self.verbs[0], self.name, {}, {}, []), ["--shell-completion", argv[1]])
            return 0
        _, _, line = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
        name, space, rest = line.lstrip().partition(" ")
        answers = [v.name for v in self.verbs if v.name.startswith(name)]
        if space:
            verb = next((v for v in self.verbs if v.name == name), None)
            answers = complete_word(rest.rpartition(" ")[2], grammar_of(verb, multirun=True), verb.words) if verb else []
        print(("\n" if shell == "fish" else " ").join(answers))
        return 0


def _check_process(argv: Sequence[str]) -> None:
    """UserError for arguments that are no text, and where there is no directory to work in."""
    for argument in argv:
        raw = os.fsencode(argument)
        if argument != argument.encode("utf-8", "replace").decode():
            raise UserError(f"{raw.decode('utf-8', 'backslashreplace')}: not text in UTF-8; write it so, or rename the file")
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working directory was removed; change to one that exists") from error


def _program() -> str:
    return os.path.basename(sys.argv[0])


def _run(verb: Verb, args: argparse.Namespace) -> int:
    """Run one verb; its status, or 2 when a point of a sweep failed. Raises UserError for everything that the user can mend."""
    multirun = bool(args.multirun) or any(o.replace(" ", "").upper() == "HYDRA.MODE=MULTIRUN" for o in args.overrides)
    grammar = grammar_of(verb, multirun, args.config_dir)
    if args.help:
        from penstock.planner.common.command.help_page import print_help

        print_help(_program(), verb.name, (verb.main.__doc__ or "").strip(), verb.example, verb.used, grammar)
        return 0
    typed = spelled_out(args.overrides, verb.words)
    if multirun:
        check_launcher(typed)
        check_files(typed)
    call, overrides = _read(verb, grammar, typed, _program())
    if args.config_dir is None:
        args.config_dir = str(profile_dir()) if profile_dir().is_dir() else None
    elif "hydra.searchpath" not in [key_of(o) for o in overrides]:
        overrides += own_profiles()
    with sweep_directory(multirun and "hydra.sweep.dir" not in [key_of(o) for o in overrides]) as sweep:
        _enter_hydra(call, arguments(args, overrides + sweep))
    if call.failed and not multirun:
        raise call.failed[0]
    return 2 if call.failed else call.status


def _read(verb: Verb, grammar: Grammar, typed: list[str], program: str) -> tuple[Call, list[str]]:
    """What ``typed`` asks of ``verb``, and all of that as Hydra reads it, with what the environment says."""
    overrides = [normalise(override, grammar) for override in typed]
    explicit = {key_of(o) for o in overrides}
    _refuse_both(verb, explicit, grammar)
    reads_wsm = verb.reads_wsm and verb.instead not in explicit
    environment = read_environment(os.environ, verb.name, explicit) if reads_wsm else Environment()
    overrides = [*_implied(verb, grammar, environment, explicit), *overrides]
    return _call(verb, grammar, typed, environment, program), overrides


def _call(verb: Verb, grammar: Grammar, typed: list[str], environment: Environment, program: str) -> Call:
    groups = {group: tuple(options) for group, options in grammar.groups.items()}
    return Call(verb, program, grammar.keys, groups, typed, environment, besides=grammar.besides)


def _refuse_both(verb: Verb, explicit: set[str], grammar: Grammar) -> None:
    """A verb that takes its problem from a file takes nothing of it from the command line."""
    if verb.instead not in explicit:
        return
    described = sorted(key for key in explicit if key.partition(".")[0] in {*grammar.groups, "force", "moe", "calibration"})
    if described:
        raise UserError(f"{described[0]}= with {verb.instead}=: the {verb.instead} holds the whole problem; leave one of them out")


def _enter_hydra(call: Call, line: list[str]) -> None:
    """Hand the command line ``line`` to the verb's ``@hydra.main``, with every exception coming out as it was raised."""
    _store_schemas(call)
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [sys.argv[0], *line]
    with calling(call), mode_by_flag(line):
        try:
            call.verb.main()
        except Exception as error:
            mistake = explain(error, call.keys, call.typed) or death_of_worker(error)
            if mistake is None:
                raise
            raise mistake from error


def _store_schemas(call: Call) -> None:
    """Let Hydra know the types of the verb's configuration, those that no earlier call in this process has told it."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store, hints = ConfigStore.instance(), get_type_hints(call.verb.schema)
    schemas = {("", f"{call.verb.name}_schema"): call.verb.schema}
    schemas |= {(group, "schema"): strip_none(hints[group])[0] for group in call.groups}
    for (group, name), schema in schemas.items():
        known = store.repo.get(group, {}) if group else store.repo
        if f"{name}.yaml" not in known or OmegaConf.get_type(known[f"{name}.yaml"].node) is not schema:
            store.store(group=group or None, name=name, node=schema)


def _implied(verb: Verb, grammar: Grammar, environment: Environment, explicit: set[str]) -> list[str]:
    """Overrides that nobody typed: this machine's own profile, the model of a checkpoint, and what the environment asks for."""
    overrides = []
    if LOCAL in grammar.groups.get("hardware", ()) and not {"hardware", verb.instead} & explicit:
        overrides.append(f"hardware={LOCAL}")
    if "model" in grammar.groups and "model.checkpoint" in explicit and not {"model", verb.instead} & explicit:
        overrides.append("model=hf")
    overrides += environment.overrides
    if environment.notes:
        overrides.append(f"notes=[{','.join(quote(note, literal=True) for note in environment.notes)}]")
    return overrides
