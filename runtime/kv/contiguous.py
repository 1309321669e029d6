"""KV on the compute device: one allocation for equal layers, written in place and kept from batch to batch: a run allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from runtime.kv.block import KvBlock, Pair


class KvBuffer:
    """K and V of one layer, [batch, kv_heads, capacity, head_dim] each, taken when first asked for."""

    def __init__(self, capacity: int, take: Callable[[torch.Tensor, torch.Tensor], Pair]):
        self.capacity = capacity
        self._take = take
        self._pair: Pair | None = None

    def like(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Room for ``capacity`` tokens of such states, in the memory that earlier batches used; a larger batch takes new memory."""
        batch = len(keys)
        if self._pair is None or len(self._pair[0]) < batch:
            self._pair = self._take(keys, values)
        return self.first(batch)

    def first(self, batch: int) -> Pair:
        """K and V of the first ``batch`` sequences, once so many were asked for."""
        if self._pair is None or len(self._pair[0]) < batch:
            raise RuntimeError(f"KV of {batch} sequences was not taken yet")
        return tuple(held[:batch] for held in self._pair)


class ContiguousLayer(DynamicLayer):
    """Keys and values of one layer in a ``KvBuffer``. Answers like transformers' own dynamic layer, which concatenates (and so copies and
    allocates) at every token."""

    def __init__(self, buffer: KvBuffer):
        super().__init__()
        self._buffer = buffer
        self._length = 0
        self._held: Pair | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> Pair:
        if self._held is None:
            self.lazy_initialization(key_states, value_states)
            self._held = self._buffer.like(key_states, value_states)
        start, end = self._length, self._length + key_states.shape[-2]
        if end > self._buffer.capacity:
            raise RuntimeError(f"KV cache of {self._buffer.capacity} tokens cannot hold {end}")
        for held, states in zip(self._held, (key_states, value_states), strict=True):
            held[:, :, start:end] = states
        self._length = end
        self.keys, self.values = (held[:, :, :end] for held in self._held)
        return self.keys, self.values

    def pretend(self, length: int) -> None:
        """Count ``length`` tokens as held: the buffers were filled by other means, or it is a rehearsal."""
        self._length = length

    def get_seq_length(self, *_args) -> int:
        return self._length


class KvBuffers:
    """What the full-attention layers of a model write to, for ``capacity`` tokens a sequence. One cache at a time.

    Costs 2 × batch × kv_heads × capacity × head_dim × dtype bytes a layer from the first pass of the largest batch on.
    """

    def __init__(self, config: PreTrainedConfig, capacity: int):
        self._config = config
        self._buffers: dict[int, KvBuffer] = {}
        self._capacity = capacity

    def pairs(self, batch: int) -> list[Pair]:
        """K and V of every layer, [batch, kv_heads, capacity, head_dim], once a pass of so many sequences was made."""
        return [self._buffers[i].first(batch) for i in sorted(self._buffers)]

    def fresh(self) -> DynamicCache:
        """An empty cache over the buffers; sliding-window layers keep transformers' own bounded layer."""
        cache = DynamicCache(config=self._config)
        held = [i for i, layer in enumerate(cache.layers) if type(layer) is DynamicLayer]
        if not self._buffers:
            self._buffers.update(self._make(held))
        for i in held:
            cache.layers[i] = ContiguousLayer(self._buffers[i])
        return cache

    def _make(self, layers: Sequence[int]) -> Iterator[tuple[int, KvBuffer]]:
        """Buffers of ``layers``, those of one kind in one block."""
        named = getattr(self._config.get_text_config(decoder=True), "layer_types", None)
        kinds: dict[str, list[int]] = {}
        for i in layers:
            kinds.setdefault(named[i] if named else "", []).append(i)
        for of_kind in kinds.values():
            block = KvBlock(len(of_kind), self._capacity)
            yield from ((i, KvBuffer(self._capacity, partial(block.take, k))) for k, i in enumerate(of_kind))
