"""What a run tells: progress, report, timeline, lessons. Asks the engine."""
