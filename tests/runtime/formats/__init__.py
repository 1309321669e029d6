"""Coded formats: their arithmetic against the references."""
