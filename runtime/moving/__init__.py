"""What moves weights: the DRAM cache, the VRAM ring, and the books of both. Stands on ``model``, whose streams it plays."""
