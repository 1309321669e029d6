"""The SSD tier: weights read in place from a checkpoint or from a packed store.

Knows which parameters of a model a unit has, so it knows the decoder inside a model; stands on ``reading``. It never builds a model.
"""
