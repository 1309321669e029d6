"""What a card or the CPU multiplies by: an expert's tensors where they lie, products with one expert, with several, and by a table."""
