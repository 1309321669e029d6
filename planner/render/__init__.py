"""A plan in words and bars for a terminal, and in one line of JSON."""
