"""Scales of coded matrices: a checkpoint whose scales are no numbers is refused, before it is loaded or as it is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import TensorEntry
from penstock.planner.contract.gguf.gguf_types import block_type
from penstock.runtime.store.parameters import Slot

READERS = 4
"""Reads in flight."""
_NO_NUMBER: Mapping[torch.dtype, tuple[np.dtype, int]] = MappingProxyType(
    {
        torch.float32: (np.dtype(np.uint32), 0x7F800000),
        torch.bfloat16: (np.dtype(np.uint16), 0x7F80),
        torch.float16: (np.dtype(np.uint16), 0x7C00),
        torch.float8_e4m3fn: (np.dtype(np.uint8), 0x7F),
        torch.float8_e8m0fnu: (np.dtype(np.uint8), 0xFF),
    }
)
"""Of what is NaN or infinite these bits are all set."""
_HALVES: Mapping[str, tuple[int, ...]] = MappingProxyType({"Q8_0": (0,), "Q4_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)})
"""Type of a GGUF file's blocks -> where the F16 numbers of each lie: d, and dmin behind it."""


class Numbers(NamedTuple):
    """``many`` of ``size`` bytes in a buffer, the first at ``at``, each ``step`` bytes behind the one before. Of what is no number all of
    ``bits`` are set."""

    at: int
    many: int
    step: int
    size: int
    bits: int


class Scale(NamedTuple):
    """A tensor of scales in a checkpoint, or one of blocks that hold theirs."""

    tensor: str
    entry: TensorEntry
    of_expert: bool
    dtype: torch.dtype
    """What its numbers are, whatever the file calls them."""
    block_bytes: int = 0
    """Of a block; 0 where the tensor holds nothing but numbers."""
    places: tuple[int, ...] = (0,)
    """Of the numbers in each block."""

    @property
    def comes_with_weights(self) -> bool:
        """Whether reading it alone would take as long as reading the weights, or it is one of many small ones."""
        return self.of_expert or self.block_bytes > 0

    def numbers(self, nbytes: int, at: int = 0) -> Iterator[Numbers]:
        """Those in ``nbytes`` of the tensor from ``at`` on. A number that is cut off is left out."""
        kind, bits = _NO_NUMBER[self.dtype]
        size = kind.itemsize
        step = self.block_bytes or size
        for place in self.places:
            first = (place - at) % step
            count = (nbytes - first - size) // step + 1
            if count > 0:
                yield Numbers(first, count, step, size, bits)

    def is_sound(self, stored: memoryview, at: int = 0) -> bool:
        """Whether the numbers in ``stored``, the tensor's bytes from ``at`` on, are finite; look.c says the same."""
        kind, bits = _NO_NUMBER[self.dtype]
        for first, count, step, _, _ in self.numbers(len(stored), at):
            numbers: np.ndarray = np.ndarray((count,), kind, stored, first, (step,))
            if ((numbers & kind.type(bits)) == kind.type(bits)).any():
                return False
        return True


def scales_of(slots: Iterable[Slot], tensors: Mapping[str, TensorEntry]) -> Iterator[Scale]:
    """Of each coded matrix in ``slots`` the leaves that are numbers, its largest one apart; and blocks that hold them."""
    coded = (slot for slot in slots if slot.coded is not None and (slot.part or 0) == 0)
    for _, group in groupby(coded, lambda slot: slot.full_name.rpartition("__")[0] or slot.full_name.rpartition(".")[0]):
        leaves = [(slot, tensor) for slot in group if slot.coded is not None for tensor in slot.coded.tensors]
        most = max(tensors[tensor].nbytes for _, tensor in leaves)
        for slot, tensor in leaves:
            block = block_type(slot.coded.format) if slot.coded else None
            # MXFP4's exponents are published as U8
            dtype = torch.float8_e8m0fnu if slot.coded and slot.coded.format == "MXFP4" else slot.dtype
            if block is not None:
                yield Scale(tensor, tensors[tensor], slot.part is not None, torch.float16, block.nbytes, _HALVES[block.name])
            elif dtype in _NO_NUMBER and tensors[tensor].nbytes < most:
                yield Scale(tensor, tensors[tensor], slot.part is not None, dtype)


class ScaleCheck:
    """Reads all of ``scales`` on threads of its own from now on, and keeps one for each of them."""

    def __init__(self, scales: Iterable[Scale]):
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="scales")
        self._found = [(scale, self._pool.submit(_is_sound, scale)) for scale in scales]

    def settle(self) -> None:
        """Return once all were read. UserError names the first that holds a NaN or an infinite number."""
        for scale, sound in self._found:
            if not sound.result():
                raise no_numbers(scale)

    def close(self) -> None:
        """Read no more. Safe to call twice."""
        self._pool.shutdown(cancel_futures=True)


def check_scales(scales: Iterable[Scale]) -> None:
    """UserError names the first of ``scales`` that holds a NaN or an infinite number."""
    with closing(ScaleCheck(scales)) as check:
        check.settle()


def no_numbers(scale: Scale) -> UserError:
    """That ``scale`` is not sound."""
    return UserError(f"{scale.entry.file}: tensor {scale.tensor} holds scales that are no numbers (NaN, or infinite); download it again")


def _is_sound(scale: Scale) -> bool:
    fd = os.open(scale.entry.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stored = os.pread(fd, scale.entry.nbytes, scale.entry.offset)
    finally:
        os.close(fd)
    return scale.is_sound(memoryview(stored))
