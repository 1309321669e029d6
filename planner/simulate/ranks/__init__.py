"""A plan of several ranks acted out: their lanes on one clock, and the hidden states that go from one to the next."""
