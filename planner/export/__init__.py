"""A plan for another engine: one file per target, and what that engine cannot express."""
