"""The SSD tier: weights read in place from a checkpoint or from a packed store."""
