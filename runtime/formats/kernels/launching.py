"""A Triton kernel launched again and again. Triton looks at every argument each time: on the host that takes longer than a small kernel."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import torch

_LINE = 16
"""What Triton asks of integers and addresses: whether they are multiples of it."""
_LEAST, _MOST = -(2**31), 2**31 - 1
"""An integer of 32 bits."""


class Launcher:
    """Keeps what Triton compiled, by all that it compiles for: constants, dtypes, and of each address and integer whether it is a multiple
    of 16, 1, or beyond 32 bits; of integers that the kernel is not compiled for, the last alone."""

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._names = tuple(kernel.arg_names)
        varying = {*(getattr(kernel, "do_not_specialize", None) or ())}
        self._varying = [at for at, name in enumerate(self._names) if name in varying]
        self._others = [at for at, name in enumerate(self._names) if name not in varying]
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, blocks: tuple[int, ...], *given: torch.Tensor | float, num_warps: int = 4, **constants: Any) -> None:
        """``given`` are the kernel's arguments in order, ``constants`` all of its constants, which come last."""
        grid = (*blocks, 1, 1)[:3]
        count, numbers = len(given), cast("tuple[float, ...]", given)  # of which the varying ones are read
        key = (
            num_warps, *constants.values(), *[_kind(given[at]) for at in self._others if at < count],
            *[_LEAST <= numbers[at] <= _MOST for at in self._varying],
        )  # fmt: skip
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._kernel[grid](*given, num_warps=num_warps, **constants)
            if compiled is not None and hasattr(compiled, "packed_metadata"):  # an interpreter compiles nothing
                self._compiled[key] = compiled
            return
        compiled[grid](*given, *[constants[name] for name in self._names[len(given) :]])


def _kind(one: torch.Tensor | float) -> Hashable:
    if isinstance(one, torch.Tensor):
        return one.dtype, one.data_ptr() % _LINE == 0
    return (one == 1, one % _LINE == 0, _LEAST <= one <= _MOST)
