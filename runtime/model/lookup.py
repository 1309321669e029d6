"""Rows of an embedding table that kernels cannot reach: gathered by the CPU."""

from __future__ import annotations

import torch
from torch import nn


def look_up_on_host(embedding: nn.Module, device: torch.device) -> None:
    """Make ``embedding``, whose table lies in pageable memory, answer on ``device``: ids come to the host, rows go back.

    Costs a synchronize a pass, and the rows queue behind the weights on the link: for machines that refuse page-locking.
    """
    host = torch.device("cpu")
    embedding._buffers.update({name: b.to(host) for name, b in embedding._buffers.items() if b is not None})
    embedding.register_forward_pre_hook(lambda _module, args: tuple(a.to(host) if torch.is_tensor(a) else a for a in args))
    embedding.register_forward_hook(lambda _module, _args, rows: rows.to(device))
