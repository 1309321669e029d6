"""What a user asks of a verb: the configuration of each."""
