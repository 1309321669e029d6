"""Plans of several ranks, without cards."""
