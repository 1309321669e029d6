"""What an engine has in DRAM and in VRAM: how it is divided, filled, bound to the model, and handed to the CPU."""
