"""The KV cache of a run."""

from runtime.kv.contiguous import make_cache

__all__ = ["make_cache"]
