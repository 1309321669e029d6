"""Words with processes of other hosts that prove to have the same secret."""
