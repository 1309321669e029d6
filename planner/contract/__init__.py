"""What passes through the door between planner and runtime."""
