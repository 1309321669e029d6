"""Routings of a run, one JSON line a token, for `planner replay`."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from penstock.planner.common.errors import UserError
from penstock.planner.contract.experts.routing import Phase
from penstock.planner.contract.experts.routing_files import routing_line
from penstock.runtime.experts.asked_ahead import CentroidsAhead, RouterAhead
from penstock.runtime.store.expert_modules import layers_with_experts

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}


class RoutingRecorder:
    """Writes to ``path`` what each token was routed to in every MoE layer, by which weights, and how the layer before scored its experts.

    Makes every visit wait for the card. Memory: one pass's routings, and what :mod:`experts.asked_ahead` keeps. The weights are those that
    the experts' outputs are multiplied by. While a first prompt passes, a router that was not met yet scores all experts alike. UserError
    where the file cannot be written.
    """

    def __init__(self, path: Path, layers: nn.ModuleList):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = _OPENERS.get(path.suffix, open)(path, "wt", encoding="utf-8")
        except OSError as error:
            raise UserError(f"moe.record={path}: cannot be written ({error.strerror}); choose another file") from error
        self._last = max(layer for layer, _ in layers_with_experts(layers))
        self._scorers = RouterAhead(layers), CentroidsAhead(layers)
        self._pass: list[tuple[Any, Any, list[Any]]] = []
        self._prompts: Sequence[int] = ()
        self._first, self._column = 0, 0

    def begin(self, prompts: Sequence[int]) -> None:
        """A batch of prompts of so many tokens comes next, padded at the left."""
        self._first += len(self._prompts)
        self._prompts, self._column, self._pass = prompts, 0, []

    def routed(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        """See :class:`penstock.runtime.experts.expert_forward.Watcher`."""
        scores = [scorer.scores(layer, hidden, index) for scorer in self._scorers]
        self._pass.append((index.tolist(), weights.tolist(), [s[:, 0].tolist() for s in scores if s is not None]))
        if layer == self._last:
            self._write(len(index) // len(self._prompts))

    def _write(self, columns: int) -> None:
        longest, scored = max(self._prompts), self._pass[:-1]
        for b, length in enumerate(self._prompts):
            for t in range(columns):
                row, pos = b * columns + t, self._column + t - (longest - length)
                if pos < 0:
                    continue
                phase = Phase.prefill if pos < length else Phase.decode
                experts, probs = ([visit[k][row] for visit in self._pass] for k in (0, 1))
                ahead, centroids = ([visit[2][k][row] for visit in scored] for k in (0, 1))
                self._file.write(routing_line(self._first + b, phase, pos, experts, probs, ahead, centroids) + "\n")
        self._column += columns
        self._pass = []

    def close(self) -> None:
        """The file is whole."""
        self._file.close()
