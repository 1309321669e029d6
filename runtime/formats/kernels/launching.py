"""A Triton kernel launched again and again. Triton looks at every argument each time: on the host that takes longer than a small kernel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

_LINE = 16
"""What Triton asks of integers and addresses: whether they are multiples of it."""
_LEAST, _MOST = -(2**31), 2**31 - 1
"""An integer of 32 bits."""


class Launcher:
    """Keeps what Triton compiled, by all that it compiles for: constants, dtypes, and of each address and integer whether it is a multiple
    of 16, 1, or beyond 32 bits; of integers that the kernel is not compiled for, the last alone. Which arguments are tensors the first call
    shows. What is compiled is given their addresses: of a tensor Triton asks the driver whether it lies on the card."""

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._names = tuple(kernel.arg_names)
        self._varying = {*(getattr(kernel, "do_not_specialize", None) or ())}
        self._tensors: tuple[int, ...] | None = None
        self._numbers: tuple[int, ...] = ()
        self._ranges: tuple[int, ...] = ()
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, blocks: tuple[int, ...], *given: torch.Tensor | float, num_warps: int = 4, **constants: Any) -> None:
        """``given`` are the kernel's arguments in order, ``constants`` all of its constants, which come last."""
        if self._tensors is None:
            self._meet(given)
        passed: list[Any] = [*given]
        kinds, lowest = [num_warps, *constants.values()], 0
        for at in self._tensors or ():
            one = passed[at]
            passed[at] = address = one.data_ptr()
            lowest |= address
            kinds.append(one.dtype)
        kinds.append(None if lowest % _LINE == 0 else tuple([passed[at] % _LINE == 0 for at in self._tensors or ()]))
        for at in self._numbers:
            one = passed[at]
            kinds.append((one == 1, one % _LINE == 0, _LEAST <= one <= _MOST))
        for at in self._ranges:
            kinds.append(_LEAST <= passed[at] <= _MOST)
        grid, key = (*blocks, 1, 1)[:3], tuple(kinds)
        known = self._compiled.get(key)
        if known is not None:
            compiled, last = known
            compiled[grid](*passed, *last)
            return
        compiled = self._kernel[grid](*given, num_warps=num_warps, **constants)
        if compiled is not None and hasattr(compiled, "packed_metadata"):  # an interpreter compiles nothing
            self._compiled[key] = compiled, tuple(constants[name] for name in self._names[len(given) :])

    def _meet(self, given: Sequence[torch.Tensor | float]) -> None:
        """Which of the arguments are what."""
        places = range(len(given))
        self._tensors = tuple(at for at in places if isinstance(given[at], torch.Tensor))
        numbers = [at for at in places if at not in self._tensors]
        self._numbers = tuple(at for at in numbers if self._names[at] not in self._varying)
        self._ranges = tuple(at for at in numbers if self._names[at] in self._varying)
