"""Scales of coded matrices, read beside everything else: a checkpoint whose scales are no numbers is refused before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import NamedTuple

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import TensorEntry
from penstock.runtime.store.parameters import Slot

READERS = 4
"""Reads in flight."""
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e8m0fnu)


class Scale(NamedTuple):
    """A tensor of scales in a checkpoint."""

    tensor: str
    entry: TensorEntry
    of_expert: bool
    dtype: torch.dtype
    """What its bytes are, whatever the file calls them."""


def scales_of(slots: Iterable[Slot], tensors: Mapping[str, TensorEntry]) -> Iterator[Scale]:
    """Of each coded matrix in ``slots`` the leaves that are numbers, its largest one apart."""
    coded = (slot for slot in slots if slot.coded is not None and (slot.part or 0) == 0)
    for _, group in groupby(coded, lambda slot: slot.full_name.rpartition("__")[0] or slot.full_name.rpartition(".")[0]):
        leaves = [(slot, tensor) for slot in group if slot.coded is not None for tensor in slot.coded.tensors]
        most = max(tensors[tensor].nbytes for _, tensor in leaves)
        for slot, tensor in leaves:
            # MXFP4's exponents are published as U8
            dtype = torch.float8_e8m0fnu if slot.coded and slot.coded.format == "MXFP4" else slot.dtype
            if dtype in _NUMBERS and tensors[tensor].nbytes < most:
                yield Scale(tensor, tensors[tensor], slot.part is not None, dtype)


def check_scales(scales: Iterable[Scale]) -> None:
    """UserError names the first of ``scales`` that holds a NaN or an infinite number. Reads them all, and keeps one for each reader."""
    with ThreadPoolExecutor(READERS) as pool:
        for scale, sound in zip(listed := list(scales), pool.map(_is_sound, listed), strict=True):
            if not sound:
                raise UserError(
                    f"{scale.entry.file}: tensor {scale.tensor} holds scales that are no numbers (NaN, or infinite); download it again"
                )


def _is_sound(scale: Scale) -> bool:
    fd = os.open(scale.entry.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stored = bytearray(os.pread(fd, scale.entry.nbytes, scale.entry.offset))
    finally:
        os.close(fd)
    return bool(torch.frombuffer(stored, dtype=scale.dtype).float().isfinite().all())
