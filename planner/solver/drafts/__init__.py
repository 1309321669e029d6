"""Drafted tokens: how many of them a plan has."""
