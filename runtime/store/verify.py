"""A packed store held against its checksums."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from penstock.runtime.reading.reader import ReadPool
from penstock.runtime.reading.store_errors import StoreError
from penstock.runtime.store.manifest import read_manifest

READ_THREADS = 4
"""Reads in flight while verifying."""
READ_BLOCK_BYTES = 8 << 20
"""Bytes of one read while verifying."""


def verify_store(path: Path, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Read every section of the packed store in ``path`` from the disk and compare its checksum.

    Peak memory: the largest section + 32 MiB. ``progress(done, total)`` counts bytes. StoreError names the first section that
    differs, with file and offset; UserError when manifest or superblock are damaged or missing.
    """
    manifest = read_manifest(path)
    weights = manifest.weights_path(path)
    sections = (*manifest.units, *manifest.others)
    total = sum(section.nbytes for section in sections)
    view = memoryview(mmap.mmap(-1, max((section.nbytes for section in sections), default=1)))
    done = 0
    progress(done, total)
    with ReadPool(READ_THREADS, READ_BLOCK_BYTES) as pool:
        for section in sections:
            piece = view[: section.nbytes]
            pool.read_now(section.layout(weights).extents, piece)
            if xxhash.xxh3_128_hexdigest(piece) != section.checksum:
                raise StoreError(
                    f"{weights}: {section.name} at offset {section.offset} ({section.nbytes} bytes) does not match its checksum; "
                    f"pack the checkpoint again"
                )
            done += section.nbytes
            progress(done, total)
        rate = pool.meter.gbps
    return {
        "store": str(path),
        "weights": str(weights),
        "uuid": manifest.uuid,
        "sections": len(sections),
        "nbytes": total,
        "read_gbps": round(rate, 3),
    }
