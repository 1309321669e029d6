"""Units that the CPU computes."""
