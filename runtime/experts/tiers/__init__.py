"""Routed experts in VRAM and DRAM: slots, what is read and copied into them, and what comes ahead of its router."""
