"""More tokens a pass: who drafts, how many tokens, and what that is worth."""
