"""A rank's part of a model: its layers, the hops between them and those of others, and the steps that rank 0 leads."""
