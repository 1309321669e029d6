"""Decoders in C for the CPU, compiled when the package is installed."""
