"""What a run tells: progress, report, timeline, lessons."""
