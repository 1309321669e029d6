"""Which token comes next."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 is greedy; otherwise nucleus sampling with ``top_p`` from ``seed``."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Sampler:
    """Picks the next token of each row on the device that computed the logits."""

    def __init__(self, sampling: Sampling, device: torch.device):
        self._sampling = sampling
        self._generator = torch.Generator(device).manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] -> [rows]."""
        if self._sampling.temperature == 0:
            return logits.argmax(-1)
        probs = torch.softmax(logits.float() / self._sampling.temperature, -1)
        if self._sampling.top_p < 1:
            ranked, order = probs.sort(dim=-1, descending=True, stable=True)
            ranked[ranked.cumsum(-1) - ranked >= self._sampling.top_p] = 0
            probs = torch.zeros_like(probs).scatter_(-1, order, ranked)
        return torch.multinomial(probs, 1, generator=self._generator).squeeze(-1)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Load the kernels that choosing from ``logits`` takes; what is drawn later does not depend on it."""
        state = self._generator.get_state()
        self(logits)
        self._generator.set_state(state)
