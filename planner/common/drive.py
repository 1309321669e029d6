"""The drive below a directory, by what does not change from boot to boot."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.planner.common.measures import show_bytes


def drive_of(path: Path, root: Path = Path("/")) -> str:
    """Device, file system and size of what holds ``path``: ``/dev/nvme0n1p2, ext4, 983 GB``. Another drive in its place nearly always
    has another size."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    source, kind = f"device {number}", "unknown"
    for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2:3] == [number] and len(right.split()) > 1:
            kind, source = right.split()[:2]
            break
    stats = os.statvfs(path)
    return f"{source}, {kind}, {show_bytes(stats.f_blocks * stats.f_frsize)}"
