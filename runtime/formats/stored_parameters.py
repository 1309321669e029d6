"""Which of a model's parameters are leaves of coded matrices, and what fills them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn


class StoredParameter(NamedTuple):
    """A parameter that holds a leaf as the checkpoint stores it."""

    format: str
    tensors: tuple[str, ...]
    """The checkpoint's, one after the other along a first dimension where there are several."""


def stored_parameters(model: nn.Module) -> dict[str, StoredParameter]:
    """Of all modules that hold coded matrices: full name of a parameter -> what it is."""
    found: dict[str, StoredParameter] = {}
    for name, module in model.named_modules():
        own: Mapping[str, StoredParameter] = getattr(module, "stored_parameters", {})
        found |= {f"{name}.{leaf}": parameter for leaf, parameter in own.items()}
    return found
