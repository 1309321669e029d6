"""Passes with prompts, recorded around attention."""
