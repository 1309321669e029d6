"""The KV cache of a run."""
