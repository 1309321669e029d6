"""What mix.c and far.c compute, in numpy: for an installation without a C compiler. Same calls, same memory. A visit
of a layer takes about 0.1 ms, 10 to 100 times as long."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

NOBODY, NEXT = -1, 1
SCORE_FEATURES = 4


def _logistic(logits: Any) -> Any:
    return 1 / (1 + np.exp(-logits))


def _placed(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The array that lies at ``address``."""
    held = (ctypes.c_char * (int(np.prod(shape)) * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(held, dtype).reshape(shape)


class _Mix:
    """``struct mix`` with its arrays."""

    def __init__(self, state: Any):
        self.state = m = state
        layers, count, top_k, groups = m.layers, m.count, m.top_k, m.near + m.far
        single, whole = np.float32, np.intc
        self.gain = _placed(m.gain, (m.rates, 1), single)
        self.tables = _placed(m.tables, (layers * groups * count, count), single)
        self.weights = _placed(m.weights, (m.further + m.rates + 4,), single)
        self.squares = _placed(m.squares, (m.further + m.rates + 4,), single)
        self.often = _placed(m.often, (layers, m.rates, count), single)
        self.odds, self.worth, self.foreseen, self.keep_error, self.fetch_error = (
            _placed(address, (layers, count), single) for address in (m.odds, m.worth, m.foreseen, m.keep_error, m.fetch_error)
        )
        self.features = _placed(m.features, (layers, 2, m.further + 3 + m.rates, count), single)
        self.rows = _placed(m.rows, (layers, 2, groups, top_k), whole)
        self.path = _placed(m.path, (2, layers, top_k), whole)
        self.learnt = _placed(m.learnt, (layers,), np.double)
        self.latest, self.follows = _placed(m.latest, (layers,), whole), _placed(m.follows, (layers,), whole)

    def use(self, layer: int, which: int, routed: np.ndarray) -> None:
        """Tokens used ``routed`` [tokens, experts], one after another."""
        m, tokens = self.state, len(routed)
        used = np.full((tokens, m.count), m.floor, np.float32)
        np.put_along_axis(used, routed, 1, axis=1)
        self.features[layer, which, -1] = used[-1]
        self.path[1, layer] = self.path[0, layer] if tokens == 1 else routed[-2, : m.top_k]
        self.path[0, layer] = routed[-1, : m.top_k]
        if tokens == 1:
            self.often[layer] += (used - self.often[layer]) * self.gain
            return
        kept = (1 - self.gain) ** np.arange(tokens - 1, -1, -1)
        self.often[layer] = self.often[layer] * (1 - self.gain) ** tokens + self.gain * (kept @ used)

    def judge(self, layer: int, which: int, scores: np.ndarray | None) -> None:
        """From the layer's latest visit: what is due in it, and what the coming layer will use."""
        m = self.state
        features, rows, groups = self.features[layer, which], self.rows[layer, which], m.near + m.far
        coming = self.odds[(layer + 1) % m.layers]
        for group in range(groups):
            back = group if group < m.near else group - m.near
            path = self.path[1, layer] if group == m.near - 1 else self.path[0, (layer - back) % m.layers]
            rows[group] = (layer * groups + group) * m.count + path
        features[: m.further] = 0 if scores is None else self.scored(scores, coming)
        features[m.further] = coming
        features[m.further + 2 : -1] = np.log(self.often[layer])
        after = m.further + 2
        near, far = self.tables[rows[: m.near].ravel()].sum(0), self.tables[rows[m.near :].ravel()].sum(0)
        self.odds[layer] = self.weights[after:] @ features[after - 1 :] + near
        self.foreseen[layer] = _logistic(self.weights[:after] @ features[:after] + far)

    def scored(self, scores: np.ndarray, odds: np.ndarray) -> np.ndarray:
        """Margin, side and slope of the scores, and the odds where there are scores."""
        m = self.state
        margin = np.log2(np.maximum(scores, np.float32(m.least_score)))
        ranked = np.sort(margin)[::-1]
        margin = margin - np.float32(0.5) * (ranked[min(m.top_k, m.count - 1)] + ranked[m.top_k - 1])
        return np.stack([margin, np.sign(margin), np.tanh(margin), odds])

    def learn(self, layer: int, which: int, pace: float) -> None:
        """From what the visit ``which`` foretold and what came."""
        m, after = self.state, self.state.further + 2
        features, rows = self.features[layer, which], self.rows[layer, which]
        keeping = (rows[: m.near], m.keep_rate, slice(after, None), features[after - 1 :], self.keep_error[layer])
        fetching = (rows[m.near :], m.fetch_rate, slice(0, after), features[:after], self.fetch_error[layer])
        for table_rows, rate, part, seen, error in (keeping, fetching):
            self.tables[np.unique(table_rows)] -= np.float32(pace * rate) * error
            gradient = seen @ error
            self.squares[part] += gradient * gradient
            self.weights[part] -= np.float32(m.weight_rate) * gradient / np.sqrt(self.squares[part])


class Uncompiled:
    """The functions of the compiled library, by their names there."""

    def mix_observe(self, place: Any, layer: int, experts: Any, n: int, scores: Any) -> int:
        """As in mix.c."""
        mix, m = _mix_of(place), place._obj
        routed = np.array(experts._obj[:n], np.intp)
        if n < m.top_k or (scores is not None and m.further != SCORE_FEATURES) or not _in_range(m, layer, routed):
            return 1
        before, which = (layer - 1) % m.layers, int(mix.latest[layer]) ^ 1
        mix.latest[layer] = which
        mix.use(layer, which, routed[None])
        recency = mix.features[layer, which, -1]
        mix.fetch_error[before] = mix.foreseen[before] - recency
        mix.judge(layer, which, None if scores is None else _placed(scores.value, (m.count,), np.float32))
        due = _logistic(mix.odds[layer])
        mix.keep_error[layer] = mix.worth[layer] - np.maximum(np.float32(m.due_later) * due, recency)
        mix.worth[layer] = due
        if mix.follows[layer]:
            mix.learnt[layer] += m.share
            mix.learn(layer, which ^ 1, float(1 / np.sqrt(mix.learnt[layer])))
        mix.follows[layer] = 1
        return 0

    def mix_study(self, place: Any, layer: int, routed: Any, tokens: int, n: int) -> int:
        """As in mix.c."""
        mix, m = _mix_of(place), place._obj
        used = _placed(routed.value, (tokens, n), np.intc).astype(np.intp)
        if n < m.top_k or not _in_range(m, layer, used):
            return 1
        mix.latest[layer] ^= 1
        which = int(mix.latest[layer])
        mix.use(layer, which, used)
        mix.judge(layer, which, None)
        mix.worth[layer] = _logistic(mix.odds[layer])
        mix.follows[layer] = 0
        return 0

    def far_observe(self, place: Any, layer: int, experts: Any, n: int, ahead: Any, rows: int) -> int:
        """As in far.c."""
        f = place._obj
        if layer < 0 or rows < 0 or rows > f.reach or layer + rows >= f.layers:
            return 1
        visits, right, told = _far_of(f)
        mine = told[layer, NEXT + 1 :]
        judged = mine != NOBODY
        visits[NEXT + 1 :] += judged
        right[NEXT + 1 :] += judged & np.isin(mine, experts._obj[:n])
        mine[:] = NOBODY
        held, scores = _placed(f.held, (f.layers, f.count), np.uint8), _placed(ahead.value, (f.reach + 1, f.count), np.float32)
        for distance in range(NEXT + 1, rows + 1):
            best = np.argsort(-scores[distance - 1], kind="stable")[: f.top_k]
            told[layer + distance, distance] = np.where(held[layer + distance, best], NOBODY, best)
        return 0

    def far_named(self, place: Any, layer: int, most: int) -> int:
        """As in far.c."""
        f = place._obj
        visits, right, told = _far_of(f)
        names, n = _placed(f.names, (f.layers * f.top_k, 2), np.intc), 0
        for distance in range(NEXT + 1, min(f.reach, f.layers - 1 - layer) + 1):
            for rank in range(min(most, f.top_k)):
                expert = told[layer + distance, distance, rank]
                if expert != NOBODY and right[distance, rank] >= f.least * visits[distance, rank]:
                    names[n] = layer + distance, expert
                    n += 1
        return n


def _mix_of(place: Any) -> _Mix:
    """The arrays of the struct that ``ctypes.byref`` points to, found once."""
    held = place._obj.__dict__
    if "arrays" not in held:
        held["arrays"] = _Mix(place._obj)
    return held["arrays"]


def _far_of(f: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = (f.reach + 1, f.top_k)
    return _placed(f.visits, shape, np.double), _placed(f.right, shape, np.double), _placed(f.told, (f.layers, *shape), np.intc)


def _in_range(m: Any, layer: int, experts: np.ndarray) -> bool:
    return bool(0 <= layer < m.layers and (experts >= 0).all() and (experts < m.count).all())
