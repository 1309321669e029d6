"""Passes over the model, launched and recorded."""
