"""What is given: the machine, the model, the work."""
