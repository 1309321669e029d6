"""Recorded routings acted out under each expert policy, beside the best possible."""
