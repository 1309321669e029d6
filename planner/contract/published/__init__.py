"""What a published config says of a model whose weights are not here, without torch."""
