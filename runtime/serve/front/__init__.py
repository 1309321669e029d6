"""The front process: HTTP, text and streams. Imports no engine."""
