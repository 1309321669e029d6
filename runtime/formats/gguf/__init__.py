"""Blocks of GGUF files: how each type is decoded."""
