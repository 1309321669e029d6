"""KV that does not fit where the model computes: layers that lie in DRAM or in a scratch file, and pass through slots."""
