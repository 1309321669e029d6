"""What is done beside running: packing, synthesis, benchmarks, directories of KV pages."""
