"""Reads: from the SSD or the page cache into slots."""
