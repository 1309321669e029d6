"""The cache that a model is given with a packed input: it keeps nothing, since attention writes to the pool itself."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from penstock.runtime.kv.batch.kv_windows import windows
from penstock.runtime.kv.batch.token_shape import Pair


class PassedOn(CacheLayerMixin):
    """Hands new K and V on to attention as they are."""

    def __init__(self, is_sliding: bool):
        super().__init__()
        self.is_sliding = is_sliding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is held."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Pair:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def row_cache(config: PreTrainedConfig) -> DynamicCache:
    """For every pass of a model with ``config``. Layers that keep something else than K and V stay transformers' own."""
    cache = DynamicCache(config=config)
    for layer, window in windows(config).items():
        cache.layers[layer] = PassedOn(window is not None)
    return cache
