"""What a client says in OpenAI's or Anthropic's words, as what a model is asked; and what it replies, as their words. Pure."""
