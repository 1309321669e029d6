"""What of a machine stands in the way of a fast run, read without changing anything and without rights."""
