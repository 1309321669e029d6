"""A module that is called row by row: what of its arguments is a row's, and its outputs as one again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of ``module``, also where it stands in for another one already."""
    return getattr(module.forward, "inner", module.forward)


def cut(value: Any, first: int, end: int, tokens: int) -> Any:
    """The part of ``value`` that belongs to tokens ``first`` to ``end`` of ``tokens``: of a tensor [1, tokens, ...], and inside tuples."""
    if isinstance(value, torch.Tensor):
        return value[:, first:end] if value.ndim > 1 and value.shape[:2] == (1, tokens) else value
    return tuple(cut(v, first, end, tokens) for v in value) if isinstance(value, tuple) else value


def joined(parts: list[Any]) -> Any:
    """Outputs of all rows as one: tensors one behind the other along their tokens, and inside tuples."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts, 1)
    return tuple(joined(list(values)) for values in zip(*parts, strict=True)) if isinstance(parts[0], tuple) else parts[0]
