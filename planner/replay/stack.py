"""What every number of slots would have kept, in one pass over a routings."""

from __future__ import annotations

import numpy as np


class Stack:
    """The experts of each layer in the order in which a growing number of slots would keep them: n slots keep the first n.

    After a visit, n slots keep the n most worthy of those that they held and those just used. What n slots keep, n + 1 keep too, since
    worth does not depend on their number (Mattson et al., Evaluation techniques for storage hierarchies, 1970). A start fills n slots with
    a layer's first n experts.
    """

    def __init__(self, layers: int, count: int):
        self._layers = np.arange(layers)
        self._held = np.tile(np.arange(count), (layers, 1))  # by depth
        self._depth = np.tile(np.arange(count + 1), (layers, 1))  # by expert, and of nobody, who is number ``count``

    def visit(self, worth: np.ndarray, used: np.ndarray) -> np.ndarray:
        """[layers, count]: the depth of each expert when a token came: n slots held those below n. Then keep by ``worth`` [layers, count]
        what was held or is among ``used`` [layers, any number]; of equals the lower number. O(layers x count ** 2)."""
        found = self._depth[:, :-1].copy()
        each, count = self._layers, worth.shape[1]
        bound = np.full((len(each), count + 1), -np.inf)  # of those not placed yet: worth; nobody and the others lose against all
        np.put_along_axis(bound, used, np.take_along_axis(worth, used, 1), 1)
        placed = np.zeros((len(each), count + 1), np.bool_)
        placed[:, -1] = True
        padded = np.concatenate([worth, np.full((len(each), 1), -np.inf)], 1)
        self._depth[:] = count
        for depth in range(count):
            comes = self._held[:, depth]
            bound[each, comes] = np.where(placed[each, comes], bound[each, comes], padded[each, comes])
            best = bound[:, :-1].argmax(1)
            best = np.where(bound[each, best] > -np.inf, best, count)
            self._held[:, depth] = best
            self._depth[each, best] = depth
            bound[each, best] = -np.inf
            placed[each, best] = True
        self._depth[:, -1] = count
        return found
