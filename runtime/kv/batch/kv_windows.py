"""How much of a sequence each layer's attention sees."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer


def windows(config: PreTrainedConfig) -> dict[int, int | None]:
    """Layer -> tokens of its sliding window, None for full attention; layers that keep something else are left out."""
    layers = enumerate(DynamicCache(config=config).layers)
    return {i: getattr(layer, "sliding_window", None) for i, layer in layers if _has_pages(layer)}


def stateful(config: PreTrainedConfig) -> frozenset[int]:
    """Layers that keep a state beside K and V, or something else in their place."""
    layers = enumerate(DynamicCache(config=config).layers)
    return frozenset(i for i, layer in layers if _has_state(layer) or (isinstance(layer, CacheLayerMixin) and not _has_pages(layer)))


def _has_pages(layer: object) -> bool:
    plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
    return plain or (isinstance(layer, DynamicLayer) and _has_state(layer))


def _has_state(layer: object) -> bool:
    return hasattr(layer, "update_conv_state")


def kinds(config: PreTrainedConfig) -> dict[int, str]:
    """The same layers with the names of their kinds; empty where a model has only one."""
    named = getattr(config.get_text_config(decoder=True), "layer_types", None)
    return {i: named[i] if named else "" for i in windows(config)}


def first_seen(start: int, window: int | None) -> int:
    """The first token that attention sees when token ``start`` comes next."""
    return 0 if window is None else max(0, start - window + 1)
