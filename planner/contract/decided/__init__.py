"""What is decided: where bytes live and when they move, and what follows from that for each unit."""
