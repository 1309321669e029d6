"""Heads that predict further tokens, by the hidden states of the model before them."""
