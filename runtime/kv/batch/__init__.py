"""The KV of the sequences that run: one pool of pages that every layer's buffer follows, and what each row has of it."""
