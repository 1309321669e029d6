"""The verbs of the runtime: runs, packing, synthesis, benchmarks, directories of KV pages. Stands on every other room."""
