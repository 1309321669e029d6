"""Units that the CPU computes beside the card, from where their bytes lie."""
