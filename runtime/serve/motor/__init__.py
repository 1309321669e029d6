"""The process that computes: requests come in by a socket, share passes over the weights, and go out token by token."""
