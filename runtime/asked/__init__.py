"""What a user asked of a run, checked without torch."""
