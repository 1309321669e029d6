"""Plans and runs of a sweep's directory in one table: as CSV, as JSON, and as a page with pictures."""
