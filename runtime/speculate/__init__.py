"""Drafted tokens: who proposes them, and which of them a pass keeps."""
