"""What writes a checkpoint's matrices in another format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Recoder(Protocol):
    """Knows every tensor that it will write before it writes the first one."""

    @property
    def said(self) -> Mapping[str, Any]:
        """The quantization_config that the store's config.json gets."""

    @property
    def leaves(self) -> Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]:
        """The checkpoint's tensor -> the tensors that take its place, by their names: (dtype as safetensors names it, shape). What is
        absent stays as it is."""

    def encode(self, name: str, matrix: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The tensors in place of ``name``, whose ``matrix`` [rows, columns] is given; of [experts, rows, columns] those of one expert,
        without their first dimension."""
