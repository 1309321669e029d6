"""Which tensors a layer is given beside its hidden states hold something of each token: positions, rotations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Path = tuple[Any, ...]
"""Keys, one inside the other: 0 and a place, or 1 and a name, and further ones."""


class Arguments(NamedTuple):
    """What a layer is called with behind its hidden states."""

    rest: tuple[Any, ...]
    named: Mapping[str, Any]

    def at(self, path: Path) -> Any:
        """What lies there."""
        value: Any = self
        for key in path:
            value = value[key]
        return value

    def path_of(self, one: object) -> Path | None:
        """Where ``one`` lies; None where nothing is that very object."""
        return next((path for path, found in _things(self, ()) if found is one), None)


class TokenTensors:
    """Of a layer that is called with ``met``, in a pass of ``tokens``. Others are called alike: by the same names, with as many."""

    def __init__(self, met: Arguments, tokens: int):
        tensors = {path: one for path, one in _things(met, ()) if isinstance(one, torch.Tensor) and one.ndim}
        found = {path: one.shape for path, one in tensors.items() if one.shape[min(1, one.ndim - 1)] == tokens}
        self._tokens, self._shapes, self._paths = tokens, found, list(found)

    def are_those_of(self, met: Arguments) -> bool:
        """Whether another layer, in a pass of as many tokens, is given as large ones in the same places."""
        return TokenTensors(met, self._tokens)._shapes == self._shapes

    def of(self, given: Arguments) -> list[torch.Tensor]:
        """Theirs, [1, tokens, ...] or [tokens] each."""
        return [given.at(path) for path in self._paths]

    def replaced(self, given: Arguments, ours: Sequence[torch.Tensor]) -> Arguments:
        """``given`` with ``ours`` in their places."""
        rest, named = _replaced(given, (), dict(zip(self._paths, ours, strict=True)))
        return Arguments(rest, named)


def _things(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """All that lies inside tuples, lists and mappings, and they themselves."""
    yield path, value
    inside = enumerate(value) if isinstance(value, tuple | list) else value.items() if isinstance(value, Mapping) else ()
    for key, one in inside:
        yield from _things(one, (*path, key))


def _replaced(value: Any, path: Path, ours: Mapping[Path, torch.Tensor]) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_replaced(one, (*path, number), ours) for number, one in enumerate(value))
    if isinstance(value, Mapping):
        return {name: _replaced(one, (*path, name), ours) for name, one in value.items()}
    return ours.get(path, value) if isinstance(value, torch.Tensor) else value
