"""KV on the compute device: one allocation a layer, written in place, so that decoding allocates nothing."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


class ContiguousLayer(DynamicLayer):
    """Keys and values of one layer in two buffers of [batch, kv_heads, capacity, head_dim], taken at the first update.

    Answers like transformers' own dynamic layer, which concatenates (and so copies and allocates) at every token. Costs
    2 × batch × kv_heads × capacity × head_dim × dtype bytes from the first token on.
    """

    def __init__(self, capacity: int):
        super().__init__()
        self._capacity = capacity
        self._length = 0
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        if self._buffers is None:
            self.lazy_initialization(key_states, value_states)
            self._buffers = tuple(s.new_empty(*s.shape[:2], self._capacity, s.shape[3]) for s in (key_states, value_states))
        start, end = self._length, self._length + key_states.shape[-2]
        if end > self._capacity:
            raise RuntimeError(f"KV cache of {self._capacity} tokens cannot hold {end}")
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self._length = end
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def pretend(self, length: int) -> None:
        """Count ``length`` tokens as held, whatever the buffers say: for rehearsing the last step of a run."""
        self._length = length

    def get_seq_length(self, *_args) -> int:
        return self._length


def make_cache(config: PreTrainedConfig, capacity: int) -> DynamicCache:
    """A cache for ``capacity`` tokens a sequence; sliding-window layers keep transformers' own bounded layer."""
    cache = DynamicCache(config=config)
    cache.layers = [ContiguousLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
