"""Routings of a run, one JSON line a token, for `planner replay`."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from penstock.planner.common.errors import UserError
from penstock.planner.contract.experts.routing import Phase
from penstock.planner.contract.experts.routing_files import routing_line
from penstock.runtime.experts.asked_ahead import CentroidsAhead, RouterAhead
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.store.expert_modules import layers_with_experts

_OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


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
        self._step = Step(())
        self._numbers: dict[int, int] = {}
        """Of the sequences that live: which prompt of the trace each is."""
        self._prompts = 0

    def begin_pass(self, step: Step) -> None:
        """``step`` comes next; a row that begins its sequence is the trace's next prompt."""
        self._step, self._pass = step, []

    def routed(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        """See :class:`penstock.runtime.experts.expert_forward.Watcher`."""
        scores = [scorer.scores(layer, hidden, index) for scorer in self._scorers]
        self._pass.append((index.tolist(), weights.tolist(), [s[:, 0].tolist() for s in scores if s is not None]))
        if layer == self._last:
            self._write()

    def _write(self) -> None:
        scored, at = self._pass[:-1], 0
        for row in self._step.rows:
            if not row.start:
                self._numbers[row.sequence], self._prompts = self._prompts, self._prompts + 1
            phase = Phase.prefill if row.kind is RowKind.prompt else Phase.decode
            for token, pos in enumerate(range(row.start, row.end), at):
                experts, probs = ([visit[k][token] for visit in self._pass] for k in (0, 1))
                ahead, centroids = ([visit[2][k][token] for visit in scored] for k in (0, 1))
                self._file.write(routing_line(self._numbers[row.sequence], phase, pos, experts, probs, ahead, centroids) + "\n")
            at += len(row.tokens)
        self._pass = []

    def close(self) -> None:
        """The file is whole."""
        self._file.close()
