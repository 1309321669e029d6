"""Triton kernels of the coded formats; imported where Triton and a card are there."""
