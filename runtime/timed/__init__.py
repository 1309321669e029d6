"""What several processes time together, each a program of its own."""
