"""The KV of earlier prompts, kept for later ones."""
