"""The next token of every row of a pass, each by its own keys: vectorised, with one copy back to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from penstock.runtime.asked.sampling_keys import Sampling
from penstock.runtime.kv.attention.page_tables import Put
from penstock.runtime.serve.motor.grammars import allowed
from penstock.runtime.serve.motor.logprobs import likeliest
from penstock.runtime.serve.motor.row_choice import RowChoice, Told, floats
from penstock.runtime.serve.wire.messages import TopLogprobs


class Picked(NamedTuple):
    token: int | None
    """None where the logits are no numbers."""
    logprobs: TopLogprobs | None = None
    error: str | None = None
    """Of the row's own grammar."""


class RowSampler:
    """Chooses on the device that computed the logits. ``put`` brings whole numbers there, past the weights.

    A batch of plain greedy rows costs one reduction over [rows, vocab]. Rows that draw cost their logits in float32, softmax and, where
    ``top_p`` stands without ``top_k``, a sort of them.
    """

    def __init__(self, put: Put):
        self._put = put

    def warm_up(self, logits: torch.Tensor) -> None:
        """Load the kernels that choosing from ``logits`` takes."""
        penalised = Sampling(1.0, top_p=0.5, repetition_penalty=1.1, presence_penalty=1)
        for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=2, min_p=0.1), penalised):
            self.choose(logits, [RowChoice(sampling, Told(logprobs=2), [0], 0, self._put) for _ in range(len(logits))])

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, choices: Sequence[RowChoice]) -> list[Picked]:
        """The next token of each row: [rows, vocab]. Each counts as said."""
        best, ids = logits.max(-1)
        errors: dict[int, str] = {}
        some = [i for i, choice in enumerate(choices) if not choice.plain]
        if some:
            ids = self._changed(logits, ids, choices, some, errors)
        found = torch.where(best.isnan(), -1, ids)
        tokens = found.tolist()
        told = self._logprobs(logits, ids, choices)
        picked = []
        for i, (choice, token) in enumerate(zip(choices, tokens, strict=True)):
            error = errors.get(i)
            if token >= 0 and error is None:
                try:
                    choice.add(token, found[i : i + 1])
                except RuntimeError as wrong:
                    error = str(wrong)
            picked.append(Picked(None if token < 0 else token, told.get(i), error))
        return picked

    def _changed(
        self, logits: torch.Tensor, ids: torch.Tensor, choices: Sequence[RowChoice], some: list[int], errors: dict[int, str]
    ) -> torch.Tensor:
        """``ids``, those of rows ``some`` chosen anew. ``errors`` gets what became of their grammars."""
        rows = self._put(some)
        scores = logits[rows].float()
        masked, masks = [], []
        for k, i in enumerate(some):
            choices[i].change(scores[k])
            matcher = choices[i].matcher
            if matcher is not None:
                try:
                    masks.append(matcher.mask())
                    masked.append(k)
                except RuntimeError as wrong:
                    errors[i] = str(wrong)
        if masked:
            where = self._put(masked)
            scores[where] = scores[where].masked_fill(~allowed(masks, scores.shape[1], self._put), -torch.inf)
        chosen = scores.argmax(-1)
        drawn = [k for k, i in enumerate(some) if choices[i].drawn]
        if drawn:
            where = self._put(drawn)
            chosen[where] = self._draw(scores[where], [choices[some[k]] for k in drawn])
        return ids.index_copy(0, rows, chosen)

    def _draw(self, scores: torch.Tensor, choices: Sequence[RowChoice]) -> torch.Tensor:
        """One id of each row [rows] from float32 ``scores`` [rows, vocab]: temperature, top_k, top_p, min_p as transformers warps them, in
        this order, then the first token at which the cumulated probability exceeds the row's chance."""
        said = [choice.sampling for choice in choices]
        vocab, count = scores.shape[1], len(said)
        keys = [*(s.temperature for s in said), *(s.top_p for s in said), *(s.min_p for s in said), *(c.draw() for c in choices)]
        heat, top_p, min_p, chance = floats(self._put, keys).view(4, count, 1).to(scores.dtype)
        scores = scores / heat
        for k, choice in enumerate(choices):
            if choice.typical is not None:
                scores[k] = choice.typical(None, scores[k : k + 1])[0]
        most = max(s.top_k or vocab for s in said)
        if most >= vocab and all(s.top_p >= 1 and not s.min_p for s in said):
            order, probs = None, torch.softmax(scores, -1)
        else:
            values, order = scores.topk(min(most, vocab))
            top_k = self._put([min(s.top_k or vocab, vocab) for s in said])[:, None]
            rank = torch.arange(values.shape[1], device=scores.device)
            probs = torch.softmax(values.masked_fill(rank >= top_k, -torch.inf), -1)
            kept = (probs.cumsum(-1) - probs < top_p) & (probs >= min_p * probs[:, :1])
            kept[:, 0] = True
            probs = probs * kept
        cumulated = probs.cumsum(-1)
        place = torch.searchsorted(cumulated, chance * cumulated[:, -1:], right=True)
        last = probs.shape[1] - 1 - (probs > 0).flip(-1).int().argmax(-1, keepdim=True)  # rounding may lead past it
        place = torch.minimum(place, last)
        return (place if order is None else order.gather(1, place))[:, 0]

    def _logprobs(self, logits: torch.Tensor, ids: torch.Tensor, choices: Sequence[RowChoice]) -> dict[int, TopLogprobs]:
        """Of the rows that ask for them, by the model's own logits."""
        asked = [i for i, choice in enumerate(choices) if choice.told.logprobs is not None]
        if not asked:
            return {}
        rows = self._put(asked)
        most = max(choices[i].told.logprobs or 0 for i in asked)
        found = likeliest(logits[rows], ids[rows], most)
        return {i: _first(own, choices[i].told.logprobs or 0) for i, own in zip(asked, found, strict=True)}


def _first(found: TopLogprobs, count: int) -> TopLogprobs:
    own, ids, logprobs = found
    return own, ids[:count], logprobs[:count]
