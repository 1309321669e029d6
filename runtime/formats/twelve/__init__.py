"""BF16 in 12 bits without loss."""
