"""Readers in C, which need no interpreter, compiled when the package is installed."""
