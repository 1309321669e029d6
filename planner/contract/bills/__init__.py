"""What a plan costs: seconds of a prefill and of a decode step, and of all requests, of the prices of their pieces."""
