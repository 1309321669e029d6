"""Rows of an embedding table that kernels cannot reach: gathered by the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class LookUpOnHost:
    """Has a model's embedding, whose table lies in pageable memory, answer on ``device``: ids come to the host, rows go back.

    Costs a synchronize a pass, and the rows queue behind the weights on the link: for machines that refuse page-locking. That is known
    when memory has been taken, so this converter alone is applied later than the others.
    """

    device: torch.device

    def convert(self, model: PreTrainedModel) -> None:
        host, embedding = torch.device("cpu"), model.get_input_embeddings()
        embedding._buffers.update({name: b.to(host) for name, b in embedding._buffers.items() if b is not None})
        embedding.register_forward_pre_hook(lambda _module, args: tuple(a.to(host) if torch.is_tensor(a) else a for a in args))
        embedding.register_forward_hook(lambda _module, _args, rows: rows.to(self.device))
