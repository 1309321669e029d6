"""What lies between the products of a decoder layer, computed by fewer kernels; see ``runtime/engine/converters.py``."""
