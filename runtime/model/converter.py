"""What may change a model: the one protocol for it."""

from __future__ import annotations

from typing import Protocol

from transformers import PreTrainedModel


class Converter(Protocol):
    """Puts other modules or functions in place of a model's own.

    ``build_skeleton`` applies a list of converters while every parameter is still on the meta device, before weights are looked for. A new
    module declares the tensors that the checkpoint holds. What it computes with is fed to it later.
    """

    def convert(self, model: PreTrainedModel) -> None:
        """Change ``model`` in place; nothing where it has no part that this is for."""
