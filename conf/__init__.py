"""Every number that a user may set: one primary config per verb, and the presets for hardware, model and workload."""
