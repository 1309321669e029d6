"""Weigh all evidence, by weights that are learnt on the way: the policy that plans choose by default."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.policy.experts.base import AheadScores
from planner.policy.experts.lfu import faded

HALF_LIVES_VISITS = (8.0, 32.0, 512.0)
"""Of the decayed frequencies: visits of the layer after which a use counts half."""

FLOOR = 0.002
"""A use that is none counts as this much of one, so that logarithms of frequencies do not fall without end."""

KEEP_LAYERS = 3
"""Layers whose experts are evidence of what the next token will use in the last of them: it, and those visited before it."""

EVIDENCE_EXPERTS = 16
"""Experts of earlier layers that are evidence of what the coming layer will use: of 8 layers with top-2 routing, of 2 with top-8."""

NEAR = 0.5
"""What an expert is worth that will be used one visit later than the next, where one that the next visit uses is worth 1; and so on."""

KEEP_RATE, FETCH_RATE, WEIGHT_RATE = 0.1, 0.3, 0.1
"""How far one visit moves the tables of evidence for keeping and for fetching, and the weights, at first."""

START_WEIGHT = 0.3
"""Of each decayed frequency and of recency, before anything was seen."""


class MixPolicy:
    """Two log-linear models over the experts of a layer, learnt online by logistic regression, their weights shared by all layers.

    *Keeping*: from decayed frequencies of several rates, whether the visit just over used the expert, and tables that say how much each
    expert of this token in this layer and the two before it, and of the token before in this layer, speaks for each expert. The model
    learns NEAR ** (visits until the next use - 1), so that what is due soon but not at once counts, too: after each visit the target is
    1 for the experts used and NEAR times today's worth for the others (temporal differences).

    *Fetching*: from the coming layer's worth, and tables that say how much each expert that was used in the layers before it speaks for
    each of its experts. The model learns the use itself, so what it foresees are probabilities.

    A visit's tables and weights learn at the layer's next visit. An observation is O(evidence x experts) in some 35 numpy calls, nearly all
    on contiguous operands of one shape: beside other work every further kind of call costs several µs, its code having left the caches.
    """

    needs_ahead: AheadScores | None = None

    def __init__(self, layers: int, count: int, top_k: int, further: Sequence[float] = ()):
        """``further``: the first weights, for fetching, of dense features that a subclass adds in :meth:`_gather`."""
        shape = _Shape(layers, count, top_k, tuple(further))
        self._layers = [LayerRecord(shape, layer) for layer in range(layers)]
        self._top_k = top_k
        self._tables = np.zeros((layers * shape.groups * count, count), np.float32)
        self._cells = self._tables.view(f"V{self._tables.itemsize * count}").ravel()  # a row as one item, which is written faster
        self._path = np.zeros((2 * layers, top_k), np.intp)  # of each layer the latest visit's experts, then those of the visit before
        weights, may_learn = shape.first_weights()
        self._weights = weights.T  # the dense ones are written as one block
        self._dense = weights[shape.rows :]
        self._dense_rate = WEIGHT_RATE * may_learn
        self._square = np.full_like(self._dense, 0.1)
        self._spread = weights[: shape.rows] * np.array([KEEP_RATE, FETCH_RATE], np.float32)
        self._share = top_k / count
        self._fade = 0.5 ** (1 / np.array(HALF_LIVES_VISITS, np.float32)[:, None])
        self._gain = (1 - self._fade).repeat(count, 1)
        self._target = np.empty(count, np.float32)
        self._said, self._scaled, self._rate = np.empty((3, 2, count), np.float32)
        self._due = self._said[0]
        self._uses, self._change = np.empty((2, *self._gain.shape), np.float32)
        self._gradient, self._step = np.empty_like(self._dense), np.empty_like(self._dense)
        self._row_step, self._changed = np.empty((2, shape.rows, count), np.float32)
        self._changed_cells = self._changed.view(self._cells.dtype).ravel()
        self._one, self._nearness = np.ones((2, count), np.float32), np.full(count, NEAR, np.float32)

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        here, before, target = self._layers[layer], self._layers[layer - 1], self._target
        now, path = here.turn(), self._path[layer]
        used = now.recency
        used.fill(FLOOR)
        for expert in experts:
            used[expert] = 1
        self._path[here.before] = path
        for rank in range(self._top_k):
            path[rank] = experts[rank]
        np.subtract(before.foreseen, used, out=before.fetch_error)
        self._uses[:] = used
        np.subtract(self._uses, here.often, out=self._change)
        self._change *= self._gain
        here.often += self._change
        self._weigh(layer, now)
        np.multiply(self._due, self._nearness, out=target)
        np.maximum(target, used, out=target)
        np.subtract(here.worth, target, out=here.keep_error)
        here.said[:] = self._said
        if here.follows:
            self._learn(here)
        here.follows = True

    def study(self, layer: int, routed: np.ndarray) -> None:
        if not len(routed):
            return
        here = self._layers[layer]
        for often, fade in zip(here.often, self._fade[:, 0].tolist(), strict=True):
            uses = faded(np.zeros(len(often)), routed, fade)
            often *= fade ** len(routed)
            often += (1 - fade) * (1 - FLOOR) * uses + (1 - fade ** len(routed)) * FLOOR
        self._path[here.before] = routed[-2:][0]
        self._path[layer] = routed[-1]
        now = here.turn()
        now.recency.fill(FLOOR)
        now.recency[routed[-1]] = 1
        self._weigh(layer, now)
        here.said[:] = self._said
        here.follows = False

    def worth(self, layer: int) -> np.ndarray:
        return self._layers[layer].worth

    def foresee(self, layer: int) -> np.ndarray:
        return self._layers[layer - 1].foreseen

    def _weigh(self, layer: int, now: Evidence) -> None:
        """From the layer's latest visit: what is due here and what the coming layer will use."""
        here, said = self._layers[layer], self._said
        self._gather(now, here, self._layers[layer + 1 - len(self._layers)])
        self._weights.dot(now.features, out=here.logits)
        np.negative(here.logits, out=said)
        np.exp(said, out=said)
        np.add(said, self._one, out=said)
        np.divide(self._one, said, out=said)

    def _gather(self, now: Evidence, here: LayerRecord, coming: LayerRecord) -> None:
        """Write into ``now`` what the visit of ``here`` just over says of it and of the ``coming`` layer, beside recency; ``further`` is a
        subclass's."""
        np.log(here.often, out=now.frequencies)
        now.prior[:] = coming.odds
        self._path.take(here.context, out=now.rows, mode="clip")
        np.add(now.rows, here.first_rows, out=now.rows)
        self._tables.take(now.rows, 0, out=now.spoken, mode="clip")

    def _learn(self, here: LayerRecord) -> None:
        """From the errors of the layer's visit before the latest one."""
        last = here.last
        here.learnt += self._share
        self._rate.fill(here.learnt**-0.5)
        np.multiply(here.errors, self._rate, out=self._scaled)
        self._spread.dot(self._scaled, out=self._row_step)
        self._tables.take(last.rows, 0, out=self._changed, mode="clip")
        np.subtract(self._changed, self._row_step, out=self._changed)
        self._cells[last.rows] = self._changed_cells
        last.dense.dot(here.errors_t, out=self._gradient)
        np.multiply(self._gradient, self._gradient, out=self._step)
        self._square += self._step
        np.sqrt(self._square, out=self._step)
        np.divide(self._gradient, self._step, out=self._step)
        self._step *= self._dense_rate
        self._dense -= self._step


class _Shape:
    """How evidence is laid out: rows from the tables, ``groups`` of ``top_k`` experts each, then the dense features: ``further``
    ones for fetching alone, logarithms of frequencies, recency, the coming layer's odds, 1."""

    def __init__(self, layers: int, count: int, top_k: int, further: tuple[float, ...]):
        self.layers, self.count, self.top_k = layers, count, top_k
        self.near = min(KEEP_LAYERS, layers) + 1
        self.far = min(max(2, EVIDENCE_EXPERTS // top_k), layers)
        self.groups = self.near + self.far
        self.rows = self.groups * top_k
        self.further = further
        self.dense = len(further) + len(HALF_LIVES_VISITS) + 3

    def first_weights(self) -> tuple[np.ndarray, np.ndarray]:
        """[rows + dense, keeping and fetching] weights, and which of the dense ones may be learnt. The rows' stay 1: their tables learn."""
        weights = np.zeros((self.rows + self.dense, 2), np.float32)
        weights[: self.near * self.top_k, 0] = 1
        weights[self.near * self.top_k : self.rows, 1] = 1
        weights[self.rows + len(self.further) : -2, 0] = START_WEIGHT
        weights[self.rows : self.rows + len(self.further), 1] = self.further
        weights[-2, 1] = 1
        may_learn = (weights[self.rows :] != 0).astype(np.float32)
        may_learn[-1] = 1
        return weights, may_learn

    def context(self, layer: int) -> np.ndarray:
        """[rows]: where in the flat path the experts are that speak in ``layer``: for keeping, those of it and the layers before it,
        and of it one visit earlier; for fetching, of it and more layers before it. Before layer 0 comes the last one, one token
        earlier."""
        near = [(layer - back) % self.layers for back in range(self.near - 1)]
        far = [(layer - back) % self.layers for back in range(self.far)]
        places = np.array([*near, self.layers + layer, *far])
        return (places[:, None] * self.top_k + np.arange(self.top_k)).ravel()


class Evidence:
    """That of one visit of a layer: [rows + dense, experts], in views by what it says."""

    def __init__(self, shape: _Shape):
        others = shape.rows + len(shape.further)
        rates = others + len(HALF_LIVES_VISITS)
        self.rows = np.zeros(shape.rows, np.intp)
        self.features = np.zeros((shape.rows + shape.dense, shape.count), np.float32)
        self.features[-1] = 1
        self.spoken = self.features[: shape.rows]
        self.further = tuple(self.features[shape.rows : others])
        self.frequencies = self.features[others:rates]
        self.recency, self.prior = self.features[rates], self.features[rates + 1]
        self.dense = self.features[shape.rows :]


class LayerRecord:
    """What is known of one layer, and its two latest visits: the errors are of the visit before the latest."""

    def __init__(self, shape: _Shape, layer: int):
        chance = shape.top_k / shape.count
        self.before = shape.layers + layer
        self.context = shape.context(layer)
        self.first_rows = (layer * shape.groups + np.arange(shape.groups).repeat(shape.top_k)) * shape.count
        self.often = np.full((len(HALF_LIVES_VISITS), shape.count), chance, np.float32)
        self.said = np.full((2, shape.count), chance, np.float32)
        self.worth, self.foreseen = self.said  # the latter of the coming layer, as its error is
        self.logits = np.full((2, shape.count), np.log(chance / max(1 - chance, FLOOR)), np.float32)
        self.odds = self.logits[0]
        self.errors = np.zeros((2, shape.count), np.float32)
        self.errors_t = self.errors.T
        self.keep_error, self.fetch_error = self.errors
        self.follows = False
        self.last, self._now = Evidence(shape), Evidence(shape)
        self.learnt = 4.0

    def turn(self) -> Evidence:
        """Begin a visit; the one before becomes ``last``."""
        self.last, self._now = self._now, self.last
        return self._now
