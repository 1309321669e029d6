"""The KV of the batch that runs."""
