"""A plan acted out on paper: the runtime's own decisions, the profile's rates, no bytes."""
