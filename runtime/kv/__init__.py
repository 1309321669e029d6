"""The KV cache of a run."""

from runtime.kv.contiguous import ContiguousLayer, make_cache

__all__ = ["ContiguousLayer", "make_cache"]
