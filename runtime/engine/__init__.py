"""A model that streams: both sides of memory, the model bound to them, passes over it, and sessions.

Stands on all rooms that hold or move something.
"""
