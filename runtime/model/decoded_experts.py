"""Routed experts decoded for good: the plain parameters that transformers' own code multiplies by."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.runtime.formats.stored_experts import JOINT


def decode_experts(module: Any) -> None:
    """Put the parameters that ``module``'s class has in place of their coded leaves, which must be there; nothing where none is coded.
    Takes the decoded experts of the layer beside the coded ones."""
    for name, matrices in getattr(module, "stored_experts", {}).items():
        rows, columns = sum(matrix.rows for matrix in matrices), matrices[0].columns
        leaves = {f"{matrix.name}{JOINT}{leaf}": None for matrix in matrices for leaf in matrix.leaves}
        held = {leaf: module.get_parameter(leaf) for leaf in leaves}
        device = next(iter(held.values())).device
        whole = torch.empty((module.num_experts, rows, columns), dtype=module.stored_dtype, device=device)
        for expert, out in enumerate(whole):
            parts = {leaf: parameter[expert] for leaf, parameter in held.items()}
            for matrix, stretch in zip(matrices, out.split([matrix.rows for matrix in matrices]), strict=True):
                matrix.coding.decode(matrix.parts(parts), stretch)
        made = whole.transpose(1, 2).contiguous() if module.is_transposed else whole
        module.register_parameter(name, nn.Parameter(made, requires_grad=False))
        for leaf in leaves:
            module.register_parameter(leaf, None)
