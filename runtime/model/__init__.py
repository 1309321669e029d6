"""The `transformers` model, built without weights."""
