"""A Triton kernel launched again and again. Triton looks at every argument each time: on the host that takes longer than a small kernel."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

_LINE = 16
"""What Triton asks of integers and addresses: whether they are multiples of it."""
_LEAST, _MOST = -(2**31), 2**31 - 1
"""An integer of 32 bits."""
_KEPT = 4096
"""Numbers of a kernel whose kinds are kept."""
Kinds = tuple[Hashable, ...]


def power_of_two(number: int) -> int:
    """The next one: Triton's own function, which kernels may call, takes as long as a launch."""
    return 1 << (number - 1).bit_length()


class Launcher:
    """Keeps what Triton compiled, by all that it compiles for: constants, dtypes, and of each address and integer whether it is a multiple
    of 16, 1, or beyond 32 bits; of integers that the kernel is not compiled for, the last alone. What is compiled is given addresses: of a
    tensor Triton asks the driver whether it lies on the card."""

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._names = tuple(kernel.arg_names)
        varying = {*(getattr(kernel, "do_not_specialize", None) or ())}
        self._varying = [at for at, name in enumerate(self._names) if name in varying]
        self._tensors: int | None = None
        """Arguments that are tensors, which come first; None before the first call."""
        self._fixed: list[int] = []
        """Of the numbers behind them those that the kernel is compiled for."""
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        self._kinds: dict[tuple[float, ...], Kinds] = {}

    def __call__(self, blocks: tuple[int, ...], *given: torch.Tensor | float, num_warps: int = 4, **constants: Any) -> None:
        """``given`` are the kernel's arguments in order, tensors before numbers; ``constants`` all of its constants, which come last."""
        count = self._tensors
        if count is None:
            count = self._tensors = sum(isinstance(one, torch.Tensor) for one in given)
            self._fixed = [at for at in range(count, len(given)) if at not in self._varying]
        tensors: Any = given[:count]
        numbers: Any = given[count:]
        addresses, lowest = [one.data_ptr() for one in tensors], 0
        for address in addresses:
            lowest |= address
        even = lowest % _LINE == 0 or tuple([address % _LINE == 0 for address in addresses])
        fixed: Any = tuple([given[at] for at in self._fixed]) if self._varying else numbers
        kinds = self._kinds.get(fixed)
        if kinds is None:
            kinds = self._kind_of(fixed)
        narrow: Hashable = True
        if self._varying:
            varying: Any = [given[at] for at in self._varying]
            narrow = (min(varying) >= _LEAST and max(varying) <= _MOST) or tuple([_LEAST <= n <= _MOST for n in varying])
        key = (num_warps, even, narrow, kinds, *constants.values(), *[one.dtype for one in tensors])
        grid, known = (*blocks, 1, 1)[:3], self._compiled.get(key)
        if known is not None:
            compiled, last = known
            compiled[grid](*addresses, *numbers, *last)
            return
        compiled = self._kernel[grid](*given, num_warps=num_warps, **constants)
        if compiled is not None and hasattr(compiled, "packed_metadata"):  # an interpreter compiles nothing
            self._compiled[key] = compiled, tuple(constants[name] for name in self._names[len(given) :])

    def _kind_of(self, numbers: tuple[float, ...]) -> Kinds:
        """What is compiled for of ``numbers``; most come again and again."""
        if len(self._kinds) >= _KEPT:
            self._kinds.clear()
        kinds = self._kinds[numbers] = tuple([(n == 1, n % _LINE == 0, _LEAST <= n <= _MOST) for n in numbers])
        return kinds
