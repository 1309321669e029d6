"""What a simulated machine's links, drives and processors do, each a lane on one clock, and what passes through them."""
