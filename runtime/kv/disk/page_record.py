"""One page on disk: a header of 4096 bytes, then the payload, all in multiples of 4096 so that O_DIRECT works.

A page has one checksum over its payload, xxh3 of 64 bits. It is made when the page is computed, and kept in the header, which has a
checksum of its own. It is compared whenever the page leaves a disk or DRAM.

Measured on one Xeon core: xxh3 of 64 or 128 bits 31 GB/s, zlib.crc32 2.1 to 4.6 GB/s; all release the interpreter. A CRC of 32 bits would
take as long as the read and miss one damaged page in 4e9, against 2e19. A checksum a layer would allow reading layers alone, which nobody
does.

The header names its segment and slot, so bytes that a file system misplaced are no record.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN
from penstock.runtime.kv.disk.page_keys import FORMAT, KEY_BYTES

MAGIC = b"PSTKKVPG"
_FIELDS = struct.Struct("<8sIIIIIxxxxQ16s16s16sQ")
_VERSION = struct.Struct("<8xI")
_SUM_BYTES = 8


@dataclass(frozen=True)
class PageShape:
    """What all pages of one namespace have in common: ``layers`` blocks of ``layer_bytes`` (K, then V), one after the other.

    UserError when ``layer_bytes`` is no multiple of 4096.
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
        if self.layers < 1:
            raise UserError(f"{self.layers} layers: KV on disk needs one at least; leave the disk tier out")

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
    checksum: int
    """Of the payload."""

    def encode(self, into: memoryview) -> None:
        """Write the header to the 4096 bytes of ``into``."""
        shape = self.shape
        into[:] = bytes(ALIGN)
        _FIELDS.pack_into(
            into, 0, MAGIC, FORMAT, self.segment, self.slot, shape.page_tokens, shape.layers, shape.layer_bytes, shape.namespace,
            self.key, self.parent, self.checksum,
        )  # fmt: skip
        into[-_SUM_BYTES:] = xxhash.xxh3_64_digest(into[:-_SUM_BYTES])


def decode(page: memoryview, segment: int) -> Header | None:
    """The header in the 4096 bytes of ``page``, or None when this is no sound header written for ``segment``."""
    if not _is_sound(page):
        return None
    _, version, number, slot, page_tokens, layers, layer_bytes, namespace, key, parent, checksum = _FIELDS.unpack_from(page)
    if version != FORMAT or number != segment:
        return None
    return Header(PageShape(namespace, page_tokens, layers, layer_bytes), number, slot, key, parent, checksum)


def is_of_other_format(page: memoryview) -> bool:
    """Whether the 4096 bytes of ``page`` are a sound header that another version wrote."""
    return _is_sound(page) and _VERSION.unpack_from(page) != (FORMAT,)


def checksum_of(payload: memoryview) -> int:
    """What a page's bytes are known by; 31 GB/s a core, without the interpreter's lock."""
    return xxhash.xxh3_64_intdigest(payload)


def _is_sound(page: memoryview) -> bool:
    return page[: len(MAGIC)] == MAGIC and page[-_SUM_BYTES:] == xxhash.xxh3_64_digest(page[:-_SUM_BYTES])
