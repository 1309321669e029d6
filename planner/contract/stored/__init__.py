"""Matrices that a checkpoint stores coded: their tensors, in which format, and what these must look like. Without torch."""
