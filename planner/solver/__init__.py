"""The integer program asked: its answer as a plan, a bound without it, and why there is none."""
