"""The two wings and the door between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import ROOT

LAYERS = ("policy", "moe", "predict", "rules", "solver", "learn")
"""Packages of the planner from the bottom up: what is kept when, what that costs, what may be, what is best, what runs taught."""


def imported(path: Path) -> Iterator[str]:
    """The modules that ``path`` imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{'.' * node.level}{node.module or ''}"


@pytest.mark.parametrize(("wing", "never"), [("planner", ("runtime", "bench", "tests")), ("runtime", ("bench", "tests"))])
def test_a_wing_does_not_import_what_stands_on_it(wing: str, never: tuple[str, ...]) -> None:
    found = {path: name for path in (ROOT / wing).rglob("*.py") for name in imported(path) if name.partition(".")[0] in never}
    assert {str(path.relative_to(ROOT)): name for path, name in found.items()} == {}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_of_the_planner_imports_none_above_it(layer: str) -> None:
    above = {*LAYERS[LAYERS.index(layer) + 1 :], "command", "verbs", "render", "explain", "simulate"}
    found = [(path.name, name) for path in (ROOT / "planner" / layer).rglob("*.py") for name in imported(path)]
    assert found
    assert [(path, name) for path, name in found if name.startswith("planner.") and name.split(".")[1] in above] == []
