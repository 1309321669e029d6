"""KV as `transformers` sees it: every layer answers like the library's own, over memory that is taken once and written in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from penstock.runtime.kv.batch.kv_block import KvBlock, Pair


class KvPlace(Protocol):
    """K and V of one layer, wherever they lie."""

    def append(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> Pair:
        """Write states [batch, kv_heads, tokens, head_dim] behind the first ``start`` tokens -> K and V of all tokens so far, for the
        kernels that are issued until the layer's attention is over."""

    def pretend(self, tokens: int) -> None:
        """So many tokens lie there, brought by other means."""

    def pair(self, batch: int) -> Pair:
        """K and V of the first ``batch`` sequences, [batch, kv_heads, capacity, head_dim], to read and write between passes."""


class KvBuffer:
    """One layer's K and V on the compute device, taken when first asked for: [batch, kv_heads, capacity, head_dim] each."""

    def __init__(self, capacity: int, take: Callable[[torch.Tensor, torch.Tensor], Pair]):
        self.capacity = capacity
        self._take = take
        self._held: Pair | None = None

    def append(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> Pair:
        batch, end = len(keys), start + keys.shape[-2]
        if self._held is None or len(self._held[0]) < batch:
            self._held = self._take(keys, values)
        pair = self.pair(batch)
        for held, states in zip(pair, (keys, values), strict=True):
            held[:, :, start:end] = states
        return tuple(held[:, :, :end] for held in pair)

    def pretend(self, tokens: int) -> None:
        """The buffer holds whatever it holds."""

    def pair(self, batch: int) -> Pair:
        if self._held is None or len(self._held[0]) < batch:
            raise RuntimeError(f"KV of {batch} sequences was not taken yet")
        return tuple(held[:batch] for held in self._held)


class ContiguousLayer(DynamicLayer):
    """Keys and values of one layer in a ``KvPlace``. Answers like transformers' own dynamic layer, which concatenates (and so copies and
    allocates) at every token; with ``window`` like its sliding-window layer, of which attention sees the last ``window`` - 1 tokens
    and the new ones, but all tokens stay, so that any stretch of them may be kept for another prompt."""

    def __init__(self, place: KvPlace, capacity: int, window: int | None = None):
        super().__init__()
        self.is_sliding = window is not None
        self._place = place
        self._capacity = capacity
        self._window = window
        self._length = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> Pair:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self._length, self._length + key_states.shape[-2]
        if end > self._capacity:
            raise RuntimeError(f"KV cache of {self._capacity} tokens cannot hold {end}")
        held = self._place.append(key_states, value_states, start)
        self._length = end
        first = first_seen(start, self._window)
        self.keys, self.values = (states[:, :, first:] for states in held) if first else held
        return self.keys, self.values

    def pretend(self, tokens: int) -> None:
        """Count ``tokens`` as held: they were brought by other means, or it is a rehearsal."""
        self._length = tokens
        self._place.pretend(tokens)

    def get_seq_length(self, *_args) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = first_seen(self._length, self._window)
        return self._length + query_length - first, first


def first_seen(start: int, window: int | None) -> int:
    """The first token that attention sees when token ``start`` comes next."""
    return 0 if window is None else max(0, start - window + 1)


class KvBuffers:
    """What the attention layers of a model write to, for ``capacity`` tokens a sequence. One cache at a time.

    Costs 2 × batch × kv_heads × capacity × head_dim × dtype bytes a layer from the first pass of the largest batch on; layers in
    ``outside`` have a place of their own.
    """

    def __init__(self, config: PreTrainedConfig, capacity: int):
        self._config = config
        self._capacity = capacity
        self._buffers: dict[int, KvBuffer] = {}
        self._outside: Mapping[int, KvPlace] = {}

    def with_outside(self, places: Mapping[int, KvPlace]) -> KvBuffers:
        """The same buffers but for the layers in ``places``."""
        other = KvBuffers(self._config, self._capacity)
        other._buffers, other._outside = self._buffers, places
        return other

    def pairs(self, batch: int) -> list[Pair]:
        """K and V of every layer, [batch, kv_heads, capacity, head_dim], once a pass of so many sequences was made."""
        places = self._buffers | dict(self._outside)
        return [places[i].pair(batch) for i in sorted(places)]

    def fresh(self) -> DynamicCache:
        """An empty cache over these places; layers of kinds that hold no keys and values stay transformers' own."""
        cache = DynamicCache(config=self._config)
        found = windows(self._config)
        if not self._buffers:
            self._buffers.update(self._make([i for i in found if i not in self._outside]))
        for i, window in found.items():
            place = self._outside.get(i) or self._buffers[i]
            cache.layers[i] = ContiguousLayer(place, self._capacity, window)
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


def windows(config: PreTrainedConfig) -> dict[int, int | None]:
    """Layer -> tokens of its sliding window, None for full attention; layers that keep something else are left out."""
    layers = enumerate(DynamicCache(config=config).layers)
    return {i: getattr(layer, "sliding_window", None) for i, layer in layers if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)}
