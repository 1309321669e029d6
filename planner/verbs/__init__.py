"""One module for each verb of `planner`, and what they share."""
