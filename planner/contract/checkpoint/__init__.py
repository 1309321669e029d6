"""What a Hugging Face checkpoint on disk says of its model, without torch."""
