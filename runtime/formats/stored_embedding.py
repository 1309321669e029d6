"""An embedding table that is stored coded, row by row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from penstock.runtime.formats.coding import Coding
from penstock.runtime.formats.stored_parameters import StoredParameter


class StoredEmbedding(nn.Module):
    """In place of an ``nn.Embedding``, or of a class that is made of it: rows are looked up as they are stored, and decoded.

    Each leaf has a row of the table in each of its rows. Costs the rows of a pass, stored and decoded.
    """

    def __init__(self, replaced: nn.Embedding, coding: Coding, parts: Mapping[str, nn.Parameter], stored: Mapping[str, StoredParameter]):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.dtype = replaced.num_embeddings, replaced.embedding_dim, replaced.weight.dtype
        self.stored_parameters = stored
        self._coding = coding
        for leaf, part in parts.items():
            self.register_parameter(leaf, part)
        replaced.register_parameter("weight", None)
        self.looked_up = replaced

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., embedding_dim], scaled and so on as the replaced module does it."""
        held, flat = self._parameters, ids.reshape(-1)
        rows = {leaf: part[flat] for leaf in self.stored_parameters if (part := held[leaf]) is not None}
        decoded = torch.empty(len(flat), self.embedding_dim, dtype=self.dtype, device=flat.device)
        self._coding.decode(rows, decoded)
        self.looked_up._parameters["weight"] = decoded  # type: ignore[assignment]
        try:
            return self.looked_up(torch.arange(len(flat), device=flat.device).view(ids.shape))
        finally:
            self.looked_up._parameters["weight"] = None
