"""The paths that clients ask."""
