"""Memory and devices: DRAM, VRAM, the card's streams, and what is free of them. Knows bytes, and nothing of models."""
