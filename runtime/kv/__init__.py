"""The KV cache of a run."""

from runtime.kv.contiguous import ContiguousLayer, KvBuffers

__all__ = ["ContiguousLayer", "KvBuffers"]
