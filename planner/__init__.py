"""planner: measures a machine, describes a model, and decides where every byte lives and when it moves."""
