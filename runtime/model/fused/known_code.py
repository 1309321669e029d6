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


@cache
def children_called(function: Callable[..., Any]) -> frozenset[str] | None:
    """Of its object ``function`` reads attributes, never sets them, and hands it on to `transformers`' function of attention alone -> the
    names of those attributes that it does nothing with but call them, with one argument. None where it does more, or has no source."""
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    inside = {id(child): node for node in ast.walk(code) for child in ast.iter_child_nodes(node)}
    found, other, handed = set[str](), set[str](), list[str]()
    for node in ast.walk(code):
        if not isinstance(node, ast.Name) or node.id != "self":
            continue
        use = inside[id(node)]
        if isinstance(use, ast.Attribute) and isinstance(use.ctx, ast.Load):
            call = inside[id(use)]
            alone = isinstance(call, ast.Call) and call.func is use and len(call.args) == 1 and not call.keywords
            (found if alone and not isinstance(call.args[0], ast.Starred) else other).add(use.attr)  # type: ignore[attr-defined]
        elif isinstance(use, ast.Call) and isinstance(use.func, ast.Name) and use.args[0] is node:
            handed.append(use.func.id)
        else:
            return None
    asked = [node for node in ast.walk(code) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and _asks(node.value)]
    named = [node.attr for node in ast.walk(code) if isinstance(node, ast.Attribute)].count("_attn_implementation")
    given = [node.targets[0] if isinstance(node, ast.Assign) else node.target for node in asked]
    if len(given) != 1 or named != 1 or handed != [ast.unparse(given[0])]:
        return None
    return frozenset(found - other)


def _asks(value: ast.expr) -> bool:
    """Whether it asks which function of attention there is, as the object's config names it."""
    return ast.unparse(value).startswith("ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, ")


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
