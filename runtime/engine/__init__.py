"""A model that streams: both sides of memory, the model bound to them, and the loop that generates."""
