"""A model dealt over ranks: one process each, one card each."""
