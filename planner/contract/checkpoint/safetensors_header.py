"""The header of a safetensors file, read and checked without torch, numpy or the safetensors package.

Format: 8 bytes of little-endian header length N, N bytes of JSON (name -> dtype, shape, data_offsets), then the data. Tensors cover the
data without gap or overlap (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.plain_files import check_fetched, open_plain

MAX_HEADER_BYTES = 100_000_000
"""Longest header that the safetensors library accepts."""

_MOST = 2**63
"""Above every offset and size."""
DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "U16": 16,
        "I16": 16,
        "F16": 16,
        "BF16": 16,
        "U32": 32,
        "I32": 32,
        "F32": 32,
        "U64": 64,
        "I64": 64,
        "F64": 64,
        "C64": 64,
    }
)
"""Bits of one element of every dtype that the format knows."""


class TensorEntry(NamedTuple):
    """Where one stored tensor lies. ``offset`` is absolute in ``file``."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    """The format's own name: ``BF16``, ``F32``, ..."""
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of one file by name, in the order of their bytes. Reads the header only.

    Raises UserError, naming the file and the remedy, when the file cannot be read, is truncated or is corrupt.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            text = file.read(length) if 0 < length <= min(MAX_HEADER_BYTES, size - 8) else b""
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; download the checkpoint again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check its permissions and the disk") from None
    check_fetched(path, prefix)
    if len(prefix) < 8:
        raise UserError(f"{path}: truncated, {size} bytes are too few for a safetensors file; download it again")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise _corrupt(path, f"its header claims {length} bytes, allowed are 2 to {MAX_HEADER_BYTES}")
    if len(text) < length:
        raise UserError(f"{path}: truncated, its header needs {8 + length} bytes and the file has {size}; download it again")
    return _check_coverage(path, [_entry(path, name, value, 8 + length) for name, value in _parse(path, text)], 8 + length, size)


def _parse(path: Path, text: bytes) -> list[tuple[str, Any]]:
    """The header's tensors as (name, value) pairs, ``__metadata__`` left out."""
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    return list(header.items())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice")
    if not "".join(found).isascii():
        "".join(found).encode("utf-8")
    return found


def _entry(path: Path, name: str, value: Any, data_start: int) -> tuple[str, TensorEntry]:
    """One tensor, its bytes held against its dtype and shape."""
    if not isinstance(value, dict):
        raise _corrupt(path, f"tensor {name!r} has no dtype, shape and data_offsets")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _corrupt(path, f"tensor {name!r} has dtype {str(dtype)[:40]!r}, allowed are {', '.join(DTYPE_BITS)}")
    if not is_counts(shape):
        raise _corrupt(path, f"tensor {name!r} has no valid shape")
    if not is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _corrupt(path, f"tensor {name!r} has no valid data_offsets")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * DTYPE_BITS[dtype] != nbytes * 8:
        raise _corrupt(path, f"tensor {name!r} has data_offsets that do not fit its dtype and shape")
    return name, TensorEntry(path, data_start + offsets[0], nbytes, dtype, tuple(shape))


def is_counts(value: Any) -> TypeGuard[list[int]]:
    """Whether ``value`` is a short list of integers from 0 to what a file can address (True is no integer here)."""
    if not isinstance(value, list) or len(value) > 64:
        return False
    for n in value:  # noqa: SIM110 - a header has hundreds of thousands, and all() takes three times as long
        if type(n) is not int or not 0 <= n < _MOST:
            return False
    return True


def _check_coverage(path: Path, entries: list[tuple[str, TensorEntry]], data_start: int, size: int) -> dict[str, TensorEntry]:
    """The entries in the order of their bytes, once they cover the data exactly."""
    entries.sort(key=lambda item: item[1][1:3])  # offset, bytes
    end = data_start
    for name, (_, offset, nbytes, *_) in entries:
        if offset != end:
            raise _corrupt(path, f"tensor {name!r} {'overlaps the one before it' if offset < end else 'follows a gap'}")
        end = offset + nbytes
    if end > size:
        raise UserError(f"{path}: truncated, its header needs {end} bytes and the file has {size}; download it again")
    if end < size:
        raise _corrupt(path, f"it has {size - end} bytes after its last tensor")
    return dict(entries)


def _corrupt(path: Path, what: str) -> UserError:
    return UserError(f"{path}: corrupt safetensors file, {what}; download it again")
