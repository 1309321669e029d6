"""Many requests in one pass: who is computed next, within which limits. No clock, no torch, no sockets."""
