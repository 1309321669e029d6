"""What a front's allocator does with what was freed."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt."""
_LARGE = 128 << 10
"""Bytes: glibc's own first choice."""


def keep_large_apart() -> None:
    """Memory of 128 KiB or more goes back to the system when it is freed, and so does as much at the heap's end.

    By itself glibc raises that limit to the largest block that was ever freed, 32 MB at most. Bodies of 400 KB then lie between small
    blocks and leave holes: 10,000 requests, some of them malformed, left 230 MB of holes, of which up to 35 MB were resident. Nothing
    where the C library is another one, or a user has set its limits.
    """
    asked = any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not asked:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _LARGE)
