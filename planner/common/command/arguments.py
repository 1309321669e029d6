"""Hydra's own flags, read and written back."""

from __future__ import annotations

import argparse
from typing import NoReturn

from penstock.planner.common.errors import UserError


def parse(argv: list[str]) -> argparse.Namespace:
    """Hydra's own flags and the overrides, in any order."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    args = parser.parse_intermixed_args(argv)
    modes = ("run", "multirun", "cfg", "info")
    chosen = [mode.replace("_", "-") for mode in modes if getattr(args, mode) not in (None, False)]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} exclude each other; keep one")
    if args.resolve and not args.cfg:
        raise UserError("--resolve needs --cfg; add --cfg job")
    return args


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}; flags are --help, --multirun, --cfg job, all else is key=value")


def arguments(args: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The command line that says what ``args`` says, with ``overrides`` in place of its own."""
    line: list[str] = []
    for name, value in vars(args).items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            line.append(flag)
        elif isinstance(value, str):
            line += [f"{flag}={value}"]
    return [*line, *overrides]
