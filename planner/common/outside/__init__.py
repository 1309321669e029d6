"""Where files, streams and the process's own limits are met as they may be: hostile, closed, short."""
