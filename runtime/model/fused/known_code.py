"""Whether a model's own code is what another computation may stand for: compared as it reads, not by the name of its class."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

_RENAMES = "transformers.utils.deprecation"


def computes_as(module: nn.Module, text: str) -> bool:
    """Whether ``module`` computes by the code of ``text``: its class does, and nobody gave it a forward of its own."""
    return "forward" not in vars(module) and reads_as(type(module).forward, text)


@cache
def reads_as(function: Callable[..., Any], text: str) -> bool:
    """Whether ``function`` has the code of ``text``, comments, annotations, decorators and a docstring aside; not if it has no source."""
    try:
        return _bare(inspect.getsource(function)) == _bare(text)
    except (OSError, TypeError, SyntaxError):
        return False


@cache
def given_alike(function: Callable[..., Any], names: tuple[str, ...]) -> bool:
    """Whether ``function`` calls each of its object's ``names`` once, all with the same argument, which is never given another value; not
    if it has no source."""
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    given, stored = [], {node.id for node in ast.walk(code) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            mine = isinstance(node.func.value, ast.Name) and node.func.value.id == "self" and not node.keywords and len(node.args) == 1
            given.append((node.func.attr, ast.unparse(node.args[0]) if mine and isinstance(node.args[0], ast.Name) else ""))
    inputs = {argument for _, argument in given}
    return sorted(name for name, _ in given) == sorted(names) and len(inputs) == 1 and "" not in inputs and not inputs & stored


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` behind decorators of `transformers` that give old names of arguments their new ones, and nothing else."""
    while getattr(function, "__globals__", {}).get("__name__") == _RENAMES and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@cache
def _bare(text: str) -> str:
    (function,) = ast.parse(textwrap.dedent(text)).body
    if not isinstance(function, ast.FunctionDef):
        raise SyntaxError("no function")
    function.decorator_list, function.returns = [], None
    given = function.args
    for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if one is not None:
            one.annotation = None
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return ast.unparse(function)
