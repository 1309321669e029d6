"""The two forms of a routing's line, checked and gathered into arrays."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.planner.contract.experts.policies.base import AheadScores
from penstock.planner.contract.experts.routing import Phase, Routings

SCORES = {AheadScores.router: "ahead", AheadScores.centroids: "centroids"}
"""What a line calls them."""

_MOST = 2**15
"""Experts of a layer, where nobody says how many there are."""


_LARGEST = 3e38
"""Above every score: what a 4-byte float holds."""


class BadLine(Exception):
    """What is wrong with a line, in words that follow its number."""


class TokenLines:
    """One line a token."""

    def __init__(self, count: int | None) -> None:
        self._experts, self._decode = array("h"), array("b")
        self._prompts: list[int | str] = []
        self._count = count
        self._scores: dict[AheadScores, array[float]] = {}
        self._shape: tuple[int, int] | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        experts = _value(row, "experts")
        if not isinstance(experts, list) or not experts or not all(isinstance(chosen, list) and chosen for chosen in experts):
            raise BadLine('has no experts of each layer: "experts" must be a list of lists')
        shape = (len(experts), len(experts[0]))
        if self._shape is None:
            self._shape = shape
            self._scores = {kind: array("f") for kind, name in SCORES.items() if name in row}
            for kind in self._scores:
                self._count = self._count or _width(row, kind)
        for chosen in experts:
            _check_experts(chosen, self._shape[1], self._count)
        if shape[0] != self._shape[0]:
            raise BadLine(f"has {shape[0]} layers; the first one has {self._shape[0]}")
        phase = row.get("phase", Phase.decode)
        if phase not in list(Phase):
            raise BadLine(f'has "phase": {phase!r}; it must be one of {", ".join(Phase)}')
        for kind, scores in self._scores.items():
            for scored in _score_rows(row, kind, self._shape[0] - 1, self._count):
                scores.extend(scored)
        for chosen in experts:
            self._experts.extend(chosen)
        self._prompts.append(_name(row, "prompt"))
        self._decode.append(phase == Phase.decode)

    def finish(self) -> Routings:
        assert self._shape is not None
        prompt, order = _grouped(self._prompts)
        tokens = len(order)
        layers, top_k = self._shape
        experts = np.frombuffer(self._experts, np.int16).reshape(tokens, layers, top_k)
        scores = {kind: np.frombuffer(s, np.float32).reshape(tokens, layers - 1, -1)[order] for kind, s in self._scores.items() if s}
        decode = np.frombuffer(self._decode, np.bool_)
        return Routings(experts[order], prompt[order], decode[order], self._count or _named(experts), scores)


class LayerLines:
    """One line a token and layer."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._experts, self._layers, self._tokens = array("h"), array("q"), array("q")
        self._problems: list[int | str] = []
        self._top_k = 0

    def add(self, row: Mapping[str, Any]) -> None:
        experts = _value(row, "experts")
        if not isinstance(experts, list) or not experts:
            raise BadLine('has no experts: "experts" must be a list')
        self._top_k = self._top_k or len(experts)
        _check_experts(experts, self._top_k, self._count)
        for name, into in (("layer", self._layers), ("token_idx", self._tokens)):
            value = _value(row, name)
            if type(value) is not int or not 0 <= value < 2**62:
                raise BadLine(f'has "{name}": {value!r}; it must be a whole number from 0 on')
            into.append(value)
        self._problems.append(_name(row, "problem_id"))
        self._experts.extend(experts)

    def finish(self) -> Routings:
        problem, _ = _grouped(self._problems)
        layer, token = np.frombuffer(self._layers, np.int64), np.frombuffer(self._tokens, np.int64)
        order = np.lexsort((layer, token, problem))
        layers = np.unique(layer)
        order, dropped = self._whole(order, problem[order], token[order], layer[order], layers)
        grid = order.reshape(-1, len(layers))
        experts = np.frombuffer(self._experts, np.int16).reshape(-1, self._top_k)[grid]
        numbers = np.unique(problem[grid[:, 0]], return_inverse=True)[1]
        return Routings(experts, numbers, np.ones(len(grid), np.bool_), self._count or _named(experts), dropped=dropped)

    def _whole(
        self, order: np.ndarray, problem: np.ndarray, token: np.ndarray, layer: np.ndarray, layers: np.ndarray
    ) -> tuple[np.ndarray, int]:
        """``order`` without the tokens at a problem's end that lack layers, and how many these are: a recording that was broken off. The
        other arrays are in that order."""
        first = np.flatnonzero(np.r_[True, (np.diff(problem) != 0) | (np.diff(token) != 0)])
        lines = np.diff(np.r_[first, len(order)])
        of_token = np.repeat(np.arange(len(first)), lines)
        place = np.arange(len(order)) - first[of_token]
        as_expected = layer == layers[np.minimum(place, len(layers) - 1)]
        whole = (lines == len(layers)) & np.logical_and.reduceat(as_expected, first)
        twice = np.logical_or.reduceat(np.r_[False, (np.diff(layer) == 0) & (np.diff(of_token) == 0)], first)
        is_last = np.r_[np.diff(problem[first]) != 0, True]
        dropped = np.zeros(len(first), np.bool_)
        for i in np.flatnonzero(~whole & ~twice)[::-1]:
            dropped[i] = is_last[i] or dropped[i + 1]
        if not (whole | dropped).all():
            at = first[np.argmin(whole | dropped)]
            raise BadLine(
                f"token {token[at]} of problem {self._problems[order[at]]!r} has not one line for each of the {len(layers)} layers"
            )
        if dropped.all():
            raise BadLine("no token has a line for each layer")
        return order[whole[of_token]], int(dropped.sum())


def _value(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise BadLine(f'lacks "{name}"')
    return row[name]


def _width(row: Mapping[str, Any], kind: AheadScores) -> int | None:
    """How many experts the line scores."""
    rows = row[SCORES[kind]]
    return len(rows[0]) if isinstance(rows, list) and rows and isinstance(rows[0], list) else None


def _score_rows(row: Mapping[str, Any], kind: AheadScores, layers: int, count: int | None) -> list[list[float]]:
    rows = _value(row, SCORES[kind])
    if not isinstance(rows, list) or len(rows) != layers:
        raise BadLine(f'has no "{SCORES[kind]}" of each layer but the last, {layers} lists')
    for scored in rows:
        if not isinstance(scored, list) or len(scored) != count or not all(type(x) in (int, float) and abs(x) < _LARGEST for x in scored):
            raise BadLine(f'has "{SCORES[kind]}" that are not one number for each expert, {count} of them')
    return rows


def _name(row: Mapping[str, Any], name: str) -> int | str:
    value: int | str = _value(row, name)
    if type(value) not in (int, str):
        raise BadLine(f'has "{name}": {value!r}; it must be a number or a name')
    return value


def _check_experts(chosen: list[Any], top_k: int, count: int | None) -> None:
    if len(chosen) != top_k:
        raise BadLine(f"has {len(chosen)} experts in a layer; the first one has {top_k}")
    for expert in chosen:
        if type(expert) is not int or not 0 <= expert < (count or _MOST):
            raise BadLine(f"has an expert {expert!r}; a layer's are numbered from 0 to {(count or _MOST) - 1}")
    if len(set(chosen)) < top_k:
        raise BadLine(f"has an expert twice in a layer: {chosen}")


def _grouped(names: Sequence[int | str]) -> tuple[np.ndarray, np.ndarray]:
    """The number of each name, by first appearance, and the order that brings equal ones together, the first first."""
    numbers: dict[int | str, int] = {}
    each = np.array([numbers.setdefault(name, len(numbers)) for name in names])
    return each, np.argsort(each, kind="stable")


def _named(experts: np.ndarray) -> int:
    """As many experts as ``experts`` names."""
    return int(experts.max()) + 1
