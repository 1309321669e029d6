"""Coded formats of weights: what decodes each and multiplies by it. Pure functions over tensors; knows no model and no store."""
