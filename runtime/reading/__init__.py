"""Reads: from the SSD or the page cache into slots. Knows how a unit lies in a buffer and in files; stands on ``memory``."""
