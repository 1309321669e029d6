"""Routed experts that do not all fit where the model computes: where they lie, and how they come. Stands on ``moving``."""
