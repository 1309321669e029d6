"""Decode steps that are recorded once and launched as a whole: kernels, copies, and the CPU's units."""
