"""The rows of a pass with several tokens, by the experts that compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

LEAST_STEP = 64
"""Rows by which the heights of products differ at least: up to there they take as long as reading the weights."""
TOGETHER = 0.75
"""Of a pass's tokens, the rows that experts have together at most: what they give last lies there twice for a moment. One expert alone may
have all of them."""


class ExpertRows:
    """Pairs of a token and one of its experts, sorted by expert. Each expert's are as many as its product is high: those behind its own are
    of no use. Memory, where the model computes: 16 bytes a row, 8 a pair."""

    def __init__(self, tokens: torch.Tensor, pairs: torch.Tensor, counts: NDArray[np.intp], heights: NDArray[np.intp], most: int):
        """``tokens`` and ``pairs``, [rows]: of each row, the token, and where it goes; of a row of no use, any and one behind all pairs.
        ``counts``, ``heights``, [experts]: rows of use and all rows. ``most``: rows of experts that are computed together."""
        self._tokens, self._pairs, self._most = tokens, pairs, most
        self._ends: list[int] = heights.cumsum().tolist()
        self._counts: list[int] = counts.tolist()
        self._heights: list[int] = heights.tolist()

    @classmethod
    def of(cls, order: torch.Tensor, chosen: NDArray[np.intp], experts: int, height: Callable[[int], int]) -> Self:
        """``order`` sorts pairs of ``chosen`` [tokens, top_k] by expert, of which there are ``experts``. ``height``: rows of an
        expert -> those of its product."""
        tokens, top_k = chosen.shape
        counts = np.bincount(chosen.ravel(), minlength=experts)
        heights = np.fromiter(map(height, counts.tolist()), np.intp, experts)
        heights[counts == 0] = 0
        most = max(int(TOGETHER * tokens), LEAST_STEP)
        if np.array_equal(counts, heights):
            return cls(order // top_k, order, counts, heights, most)
        behind = order.new_full((1,), chosen.size)
        pairs = torch.cat((order, behind)).index_select(0, _there(_sources(counts, heights), order.device))
        return cls((pairs // top_k).clamp_(max=tokens - 1), pairs, counts, heights, most)

    def fit(self, experts: Sequence[int]) -> int:
        """How many of ``experts``, from the first, are computed together."""
        rows, number = self._heights[experts[0]], 1
        for expert in experts[1:]:
            rows += self._heights[expert]
            if rows > self._most:
                break
            number += 1
        return number

    def heights(self, experts: Sequence[int]) -> list[int]:
        return [self._heights[expert] for expert in experts]

    def taken(self, experts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all rows of ``experts``, one expert's behind the other's: their tokens, and where they go."""
        stretches: list[tuple[int, int]] = []
        for expert in experts:
            end = self._ends[expert]
            begin = end - self._heights[expert]
            if stretches and stretches[-1][1] == begin:
                begin, _ = stretches.pop()
            stretches.append((begin, end))
        parts = [(self._tokens[begin:end], self._pairs[begin:end]) for begin, end in stretches]
        if len(parts) == 1:
            return parts[0]
        tokens, pairs = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(pairs)

    def own(self, expert: int) -> torch.Tensor:
        """Where the rows of use of ``expert`` go."""
        begin = self._ends[expert] - self._heights[expert]
        return self._pairs[begin : begin + self._counts[expert]]


def _sources(counts: NDArray[np.intp], heights: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of each row its place among all sorted pairs; behind them where it is of no use."""
    ends, behind = counts.cumsum(), heights.cumsum()
    place = np.arange(behind[-1]) + np.repeat(ends - counts - behind + heights, heights)
    return np.where(place < np.repeat(ends, heights), place, ends[-1])


def _there(numbers: NDArray[np.intp], device: torch.device) -> torch.Tensor:
    here = torch.from_numpy(numbers)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def padded(rows: int, tokens: int) -> int:
    """The height of the product for an expert with ``rows`` of a prompt's ``tokens``: the next eighth of a power of two, at least
    ``LEAST_STEP`` and at most ``tokens``."""
    step = max(LEAST_STEP, 1 << max(0, rows.bit_length() - 4))
    return min(-(-rows // step) * step, tokens)


def height_of(hidden: torch.Tensor, prompt: bool) -> Callable[[int], int]:
    """Rows of an expert -> those of its product."""
    return partial(padded, tokens=len(hidden)) if prompt and hidden.is_cuda else int


def heights(tokens: int) -> list[int]:
    """All that ``padded`` gives."""
    return sorted({padded(rows, tokens) for rows in range(1, tokens + 1)})
