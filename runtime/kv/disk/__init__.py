"""Kept pages on disk."""
