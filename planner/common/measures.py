"""Sizes as people read and write them. GB = 1e9 bytes, GiB = 2**30 bytes."""

from __future__ import annotations

import math
import re

_FACTOR = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?i?b?)\s*$", re.IGNORECASE | re.ASCII)

GB = 10**9
ALIGN = 4096
"""Alignment of O_DIRECT offsets, lengths and addresses, in bytes."""


def parse_bytes(text: str) -> int | None:
    """Bytes meant by ``text`` (``6GiB``, ``1.5 GB``, ``4096``), or None when it is not a size, or one beyond all numbers."""
    match = _SIZE.match(text)
    if match is None:
        return None
    factor = _FACTOR.get(match.group(2).lower())
    size = math.inf if factor is None else float(match.group(1)) * factor
    return round(size) if math.isfinite(size) else None


def show_bytes(n: float) -> str:
    """``n`` bytes in decimal units with three figures: ``1.71 GB``."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= factor:
            return f"{n / factor:.3g} {unit}" if abs(n) < 1000 * factor else f"{n / factor:.0f} {unit}"
    return f"{n:.0f} B"


def show_seconds(s: float) -> str:
    """``s`` seconds with a unit that suits: ``221 ms``, ``3.4 s``, ``12 µs``, ``1097 s``."""
    if abs(s) >= 1000:
        return f"{s:.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(s) >= factor:
            return f"{s / factor:.3g} {unit}"
    return "0 s" if s == 0 else f"{s / 1e-9:.3g} ns"


def show_rate(rate: float) -> str:
    """``rate`` a second, or a token, with three figures: ``0.433``, ``48.7``, ``1,350``."""
    return f"{rate:.3g}" if abs(rate) < 999.5 else f"{rate:,.0f}"


def align_up(n: int, to: int = ALIGN) -> int:
    """The smallest multiple of ``to`` that is not below ``n``."""
    return -(-n // to) * to


def align_down(n: int, to: int = ALIGN) -> int:
    """The largest multiple of ``to`` that is not above ``n``."""
    return n // to * to
