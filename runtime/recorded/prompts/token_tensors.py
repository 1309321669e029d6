"""Which tensors a layer is given beside its hidden states hold something of each token: positions, rotations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_Path = tuple[Any, ...]


class Arguments(NamedTuple):
    """What a layer is called with behind its hidden states."""

    rest: tuple[Any, ...]
    named: Mapping[str, Any]


class TokenTensors:
    """Of a layer that is called with ``met``, in a pass of ``tokens``. Others are called alike: by the same names, with as many."""

    def __init__(self, met: Arguments, tokens: int):
        self._paths = [path for path, tensor in _tensors(met, ()) if tensor.ndim and tensor.shape[min(1, tensor.ndim - 1)] == tokens]

    def of(self, given: Arguments) -> list[torch.Tensor]:
        """Theirs, [1, tokens, ...] or [tokens] each."""
        found = []
        for path in self._paths:
            value: Any = given
            for key in path:
                value = value[key]
            found.append(value)
        return found

    def replaced(self, given: Arguments, ours: Sequence[torch.Tensor]) -> Arguments:
        """``given`` with ``ours`` in their places."""
        rest, named = _replaced(given, (), dict(zip(self._paths, ours, strict=True)))
        return Arguments(rest, named)


def _tensors(value: Any, path: _Path) -> Iterator[tuple[_Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, tuple | list):
        for number, one in enumerate(value):
            yield from _tensors(one, (*path, number))
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _tensors(one, (*path, name))


def _replaced(value: Any, path: _Path, ours: Mapping[_Path, torch.Tensor]) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_replaced(one, (*path, number), ours) for number, one in enumerate(value))
    if isinstance(value, Mapping):
        return {name: _replaced(one, (*path, name), ours) for name, one in value.items()}
    return ours.get(path, value) if isinstance(value, torch.Tensor) else value
