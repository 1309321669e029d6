"""The header of a GGUF file, read and checked without torch, numpy or the gguf package.

Format: "GGUF", version, counts of tensors and of metadata; the metadata (key, type, value); for each tensor its name, dimensions with the
fastest first, type and offset; then the data, aligned (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.plain_files import check_fetched, open_plain
from penstock.planner.contract.gguf.gguf_types import READ, BlockType, type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20
"""Of vocabulary, merges and names: the largest published ones take 20 MB."""
MAX_TENSORS = 1 << 18
MAX_DIMENSIONS = 4
KEPT_ITEMS = 4096
"""The longest array whose values are kept: one number a layer. Of a longer one, as the vocabulary is, the length is."""

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, struct.Struct] = MappingProxyType(
    {number: struct.Struct("<" + code) for number, code in enumerate("BbHhIif?")}
    | {number: struct.Struct("<" + code) for number, code in ((10, "Q"), (11, "q"), (12, "d"))}
)
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True)
class Items:
    """A long array of the metadata, of which only the length is kept."""

    count: int


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. ``offset`` is absolute in ``file``."""

    file: Path
    offset: int
    nbytes: int
    block: BlockType
    shape: tuple[int, ...]
    """Row-major, as torch has it."""


@dataclass(frozen=True)
class GgufHeader:
    """What one file says."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    """In the order of the file."""
    pairs: int
    """Of the metadata."""
    pairs_at: tuple[int, int]
    """Where they begin and end in the file."""


def without_tensors(file: Path) -> bytes:
    """A GGUF file that has the metadata of ``file`` and no tensors: what a tokenizer is read from. UserError as :func:`read_gguf`."""
    header = read_gguf(file)
    begin, end = header.pairs_at
    with open_plain(file) as source:
        source.seek(begin)
        return MAGIC + _U32.pack(VERSIONS[-1]) + _U64.pack(0) + _U64.pack(header.pairs) + source.read(end - begin)


class _Flaw(Exception):
    """What is wrong with a file, in words."""


class _Reader:
    """A place in the bytes of a header, which moves on with every read and never leaves them."""

    def __init__(self, data: mmap.mmap, end: int):
        self.data, self.at, self.end = data, 0, end

    def scalar(self, kind: struct.Struct) -> Any:
        self.need(kind.size)
        (value,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return value

    def need(self, nbytes: int) -> None:
        if nbytes > self.end - self.at:
            raise _Flaw(f"at byte {self.at} it needs {nbytes} bytes more and {self.end - self.at} are there")

    def count(self, most: int, each: int, what: str) -> int:
        """A number of things of at least ``each`` bytes."""
        found: int = self.scalar(_U64)
        if found > min(most, (self.end - self.at) // each):
            raise _Flaw(f"it claims {found} {what}")
        return found

    def string(self) -> str:
        size = self.scalar(_U64)
        self.need(size)
        try:
            text = self.data[self.at : self.at + size].decode("utf-8")
        except UnicodeDecodeError:
            raise _Flaw(f"the string at byte {self.at} is not UTF-8") from None
        self.at += size
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise _Flaw(f"at byte {self.at} the metadata has a value of type {kind}, known are 0 to 12")
        inner = self.scalar(_U32)
        if inner in _SCALARS:
            each = _SCALARS[inner].size
            count = self.count(self.end, each, "elements of an array")
            if count <= KEPT_ITEMS:
                return [self.scalar(_SCALARS[inner]) for _ in range(count)]
            self.at += count * each
            return Items(count)
        if inner != _STRING:
            raise _Flaw(f"at byte {self.at} the metadata has an array of type {inner}, known are numbers and strings")
        count = self.count(self.end, 8, "strings of an array")
        if count <= KEPT_ITEMS:
            return [self.string() for _ in range(count)]
        self._pass_strings(count)
        return Items(count)

    def _pass_strings(self, count: int) -> None:
        at, end, unpack, data = self.at, self.end - 8, _U64.unpack_from, self.data
        for _ in range(count):
            if at > end:
                raise _Flaw(f"at byte {at} an array of {count} strings goes beyond the file")
            at += 8 + unpack(data, at)[0]
        if at > self.end:
            raise _Flaw(f"an array of {count} strings goes beyond the file")
        self.at = at


def read_gguf(path: Path) -> GgufHeader:
    """The metadata and the tensors of one file, its data untouched.

    Takes the header's own bytes of memory mapped, kilobytes kept. UserError, one line that names the file, for what is no GGUF file,
    truncated, corrupt, or has a tensor of a type that is not read.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = file.read(8)
            check_fetched(path, begin)
            if begin[:4] != MAGIC or len(begin) < 8:
                raise UserError(f"{path}: not a GGUF file, it does not begin with {MAGIC.decode()!r}; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data, size)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; download the checkpoint again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check its permissions and the disk") from None
    except _Flaw as flaw:
        raise UserError(f"{path}: corrupt or truncated GGUF file, {flaw}; download it again") from None


def _parse(path: Path, data: mmap.mmap, size: int) -> GgufHeader:
    reader = _Reader(data, min(size, MAX_HEADER_BYTES))
    reader.at = 4
    version = reader.scalar(_U32)
    if version not in VERSIONS:
        order = ", of the other byte order" if version >> 24 in VERSIONS else ""
        raise UserError(
            f"{path}: GGUF version {version}{order}, read are {' and '.join(map(str, VERSIONS))}; convert it by a new llama.cpp"
        )
    tensors = reader.count(MAX_TENSORS, 4 + 8 + 12, "tensors")
    pairs = reader.count(reader.end, 8 + 4 + 1, "pairs of metadata")
    metadata: dict[str, Any] = {}
    began = reader.at
    for _ in range(pairs):
        key = reader.string()
        if key in metadata:
            raise _Flaw(f"the key {key[:60]!r} is there twice")
        metadata[key] = reader.value(reader.scalar(_U32))
    ended = reader.at
    entries = [_entry(path, reader) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise _Flaw(f"general.alignment is {str(alignment)[:20]!r}, allowed is a power of 2 from 8 on")
    start = -(-reader.at // alignment) * alignment
    placed = _placed(path, entries, start, alignment, size)
    return GgufHeader(MappingProxyType(metadata), MappingProxyType(placed), pairs, (began, ended))


def _entry(path: Path, reader: _Reader) -> tuple[str, tuple[int, ...], BlockType, int]:
    name, dimensions = reader.string(), reader.scalar(_U32)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise _Flaw(f"tensor {name[:60]!r} has {dimensions} dimensions, allowed are 1 to {MAX_DIMENSIONS}")
    shape = tuple(reversed([reader.scalar(_U64) for _ in range(dimensions)]))
    number, offset = reader.scalar(_U32), reader.scalar(_U64)
    block = READ.get(number)
    if block is None:
        raise UserError(
            f"{path}: tensor {name[:60]!r} is of type {type_name(number)}, read are {', '.join(b.name for b in READ.values())}; "
            "take another quantisation of the model"
        )
    if not all(shape) or math.prod(shape) >= 2**48:
        raise _Flaw(f"tensor {name[:60]!r} has the shape {list(shape)}")
    if shape[-1] % block.columns:
        raise _Flaw(f"tensor {name[:60]!r} has rows of {shape[-1]} elements, and blocks of {block.name} hold {block.columns}")
    return name, shape, block, offset


def _placed(
    path: Path, entries: list[tuple[str, tuple[int, ...], BlockType, int]], start: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    """The tensors once each lies within the file and beside the others."""
    found: dict[str, GgufTensor] = {}
    for name, shape, block, offset in entries:
        nbytes = math.prod(shape[:-1]) * block.row_bytes(shape[-1])
        if name in found:
            raise _Flaw(f"tensor {name[:60]!r} is there twice")
        if offset % alignment:
            raise _Flaw(f"tensor {name[:60]!r} lies at {offset}, no multiple of {alignment}")
        if start + offset + nbytes > size:
            raise _Flaw(f"tensor {name[:60]!r} ends at byte {start + offset + nbytes} and the file has {size}")
        found[name] = GgufTensor(path, start + offset, nbytes, block, shape)
    end, last = 0, ""
    for name, tensor in sorted(found.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise _Flaw(f"tensor {name[:60]!r} overlaps {last[:60]!r}")
        end, last = tensor.offset + tensor.nbytes, name
    return found
