"""What the planner's probe has the runtime's own code time, each a program of its own: decoders, products of the CPU, links and hops."""
