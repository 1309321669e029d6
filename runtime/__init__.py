"""The runtime: executes a plan on a real checkpoint, measures, and says where the plan was wrong."""
