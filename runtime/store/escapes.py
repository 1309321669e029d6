"""The escapes of a packed store's lossless matrices: each must lie in its matrix, behind the one before."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.planner.common.errors import UserError
from penstock.runtime.reading.layout import TensorLayout
from penstock.runtime.store.parameters import Slot
from penstock.runtime.store.sections import Section

_READERS = 8
_FORM, _LEAF = "lossless", "at"


class _Places(NamedTuple):
    """Of one matrix."""

    section: Section
    tensor: TensorLayout
    numbers: int
    """Of the matrix: places are below it."""


def check_escapes(weights: Path, held: Iterable[tuple[Section, Iterable[Slot]]]) -> None:
    """Reads the places of all escapes of the sections ``held``, each with its slots: 4 bytes for some 4096 weights, in one small read a
    matrix. UserError names the first matrix that has one outside of it, or two out of order."""
    found = [places for section, slots in held for places in _places(section, slots)]
    if not found:
        return
    fd = os.open(weights, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(_READERS) as readers:
            sound = list(readers.map(lambda places: _sound(fd, places), found))
    finally:
        os.close(fd)
    wrong = next((places for places, fits in zip(found, sound, strict=True) if not fits), None)
    if wrong is not None:
        raise UserError(
            f"{weights}: {wrong.tensor.name} of {wrong.section.name} names places outside of its matrix, or out of order, so the store is "
            "damaged; pack the checkpoint again"
        )


def _places(section: Section, slots: Iterable[Slot]) -> Iterator[_Places]:
    leaves = {slot.name for slot in slots if slot.coded is not None and slot.coded.format == _FORM}
    tensors = {tensor.name: tensor for tensor in section.tensors}
    for name, tensor in tensors.items():
        if name in leaves and name.endswith(_LEAF) and name.removesuffix(_LEAF)[-1:] in (".", "_"):
            yield _Places(section, tensor, tensors[f"{name.removesuffix(_LEAF)}low"].nbytes)


def _sound(fd: int, places: _Places) -> bool:
    data = os.pread(fd, places.tensor.nbytes, places.section.offset + places.tensor.offset)
    at = np.frombuffer(data, np.int32)
    used = at[: len(np.trim_zeros(at, "b"))]  # behind the last one room is left over
    return len(data) == places.tensor.nbytes and bool(((at >= 0) & (at < places.numbers)).all() and (np.diff(used) > 0).all())
