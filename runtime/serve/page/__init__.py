"""The page at `/`: a conversation, and the machine at work. Plain files, served as they are."""
