"""The plan, and the file that holds it."""
