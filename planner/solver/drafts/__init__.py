"""Who drafts, how many tokens, and the plan beside a model that drafts."""
