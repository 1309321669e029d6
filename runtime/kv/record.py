"""One page on disk: a header of 4096 bytes, then the payload, all of it in multiples of 4096 so that O_DIRECT works.

Checksums are xxh3 of 64 bits, one for each layer's block so that a layer can be read alone, kept in the header, which has one of its
own. Measured on one Xeon core: xxh3 of 64 or of 128 bits 31 GB/s, zlib.crc32 2.1 to 4.6; all let other threads run. A CRC of 32 bits
would cost as much time as the read itself and miss one damaged block in 4e9, against 2e19; 128 bits would leave room for half as
many layers in the header.

The header says which segment and slot it was written for, so bytes that a file system misplaced are no record.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from planner.errors import UserError
from planner.units import ALIGN
from runtime.kv.keys import FORMAT, KEY_BYTES

MAGIC = b"PSTKKVPG"
_FIELDS = struct.Struct("<8sIIIIIxxxxQ16s16s16s")
_SUM_BYTES = 8
MAX_LAYERS = (ALIGN - _FIELDS.size - _SUM_BYTES) // _SUM_BYTES


@dataclass(frozen=True)
class PageShape:
    """What all pages of one namespace have in common: ``layers`` blocks of ``layer_bytes`` (K, then V), one after the other.

    UserError when ``layer_bytes`` is no multiple of 4096 or there are more layers than a header describes.
    """

    namespace: bytes
    page_tokens: int
    layers: int
    layer_bytes: int

    def __post_init__(self) -> None:
        if len(self.namespace) != KEY_BYTES:
            raise ValueError(f"a namespace of {len(self.namespace)} bytes, {KEY_BYTES} are needed")
        if self.layer_bytes < 1 or self.layer_bytes % ALIGN:
            raise UserError(
                f"page_tokens={self.page_tokens}: {self.layer_bytes} bytes a layer are no multiple of {ALIGN}, "
                f"KV on disk needs that; take larger pages"
            )
        if not 1 <= self.layers <= MAX_LAYERS:
            raise UserError(f"{self.layers} layers: KV on disk allows 1 to {MAX_LAYERS}; leave the disk tier out")

    @property
    def payload_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def record_bytes(self) -> int:
        """Header and payload."""
        return ALIGN + self.payload_bytes


@dataclass(frozen=True)
class Header:
    shape: PageShape
    segment: int
    slot: int
    key: bytes
    parent: bytes
    sums: bytes
    """8 bytes a layer."""

    def encode(self, into: memoryview) -> None:
        """Write the header to the 4096 bytes of ``into``."""
        shape = self.shape
        into[:] = bytes(ALIGN)
        _FIELDS.pack_into(
            into, 0, MAGIC, FORMAT, self.segment, self.slot, shape.page_tokens, shape.layers, shape.layer_bytes, shape.namespace,
            self.key, self.parent,
        )  # fmt: skip
        into[_FIELDS.size : _FIELDS.size + len(self.sums)] = self.sums
        into[-_SUM_BYTES:] = xxhash.xxh3_64_digest(into[:-_SUM_BYTES])


def decode(page: memoryview, segment: int) -> Header | None:
    """The header in the 4096 bytes of ``page``, or None when this is no sound header written for ``segment``."""
    if page[: len(MAGIC)] != MAGIC or page[-_SUM_BYTES:] != xxhash.xxh3_64_digest(page[:-_SUM_BYTES]):
        return None
    _, version, number, slot, page_tokens, layers, layer_bytes, namespace, key, parent = _FIELDS.unpack_from(page)
    if version != FORMAT or number != segment:
        return None
    sums = bytes(page[_FIELDS.size : _FIELDS.size + layers * _SUM_BYTES])
    return Header(PageShape(namespace, page_tokens, layers, layer_bytes), number, slot, key, parent, sums)


def checksums(payload: memoryview, layer_bytes: int) -> bytes:
    """8 bytes for each block of ``layer_bytes``."""
    return b"".join(xxhash.xxh3_64_digest(payload[at : at + layer_bytes]) for at in range(0, len(payload), layer_bytes))


def damaged_layer(blocks: memoryview, layers: Sequence[int], layer_bytes: int, sums: bytes) -> int | None:
    """The first of ``layers``, whose blocks lie in ``blocks`` one after the other, that its checksum in ``sums`` contradicts."""
    for i, layer in enumerate(layers):
        found = xxhash.xxh3_64_digest(blocks[i * layer_bytes : (i + 1) * layer_bytes])
        if found != sums[layer * _SUM_BYTES : (layer + 1) * _SUM_BYTES]:
            return layer
    return None
