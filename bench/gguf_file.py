"""GGUF files of version 3, as they are laid out: metadata, the list of tensors, their bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

GGUF_TYPES: Mapping[str, tuple[int, int, int]] = {
    "F32": (0, 1, 4), "Q4_0": (2, 32, 18), "Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210), "BF16": (30, 1, 2), "MXFP4": (39, 32, 17),
}  # fmt: skip
"""Name -> (number in the file, elements of a block, bytes of it)."""
ALIGN = 32
"""Each tensor begins at a multiple of it, as the format's default has it."""
WRITERS = 16
Value = int | float | str | Sequence[str]
"""Of the metadata: U32, F32, a text, or texts."""


class Stored(Protocol):
    """A tensor of the file; ``shape`` is the row-major one, which the file turns round."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def pieces(self) -> Iterator[memoryview]: ...


def write_gguf_file(path: Path, metadata: Mapping[str, Value], tensors: Sequence[Stored]) -> None:
    """The file ``path``. Threads write pieces where they belong: in memory, some GB/s a core. Memory: the pieces' own."""
    said = [_text(key) + _value(value) for key, value in metadata.items()]
    infos, at = [], 0
    for one in tensors:
        shape = tuple(reversed(one.shape))
        infos.append(_text(one.name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, GGUF_TYPES[one.dtype][0], at))
        at += -(-one.nbytes // ALIGN) * ALIGN
    text = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(said)) + b"".join(said) + b"".join(infos)
    text += bytes(-len(text) % ALIGN)
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(min(WRITERS, os.cpu_count() or 1)) as threads:
        file.truncate(len(text) + at)
        list(threads.map(lambda placed: _put(file.fileno(), *placed), [(0, memoryview(text)), *_placed(tensors, len(text))]))


def _placed(tensors: Sequence[Stored], at: int) -> Iterator[tuple[int, memoryview]]:
    """Each piece and where it belongs."""
    for one in tensors:
        begin = at
        for piece in one.pieces():
            yield at, piece
            at += len(piece)
        at = begin + -(-one.nbytes // ALIGN) * ALIGN


def _put(fd: int, at: int, piece: memoryview) -> None:
    while piece:
        done = os.pwrite(fd, piece, at)
        at, piece = at + done, piece[done:]


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
