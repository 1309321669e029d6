"""What a user asked of a run, checked without torch. Knows the planner's contract, and no other room."""
