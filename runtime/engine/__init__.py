"""A model that streams: both sides of memory, the model bound to them, and the loop that generates.

Stands on all rooms that hold or move something.
"""
