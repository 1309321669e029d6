"""Raw block devices: whether one may be overwritten, and its size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from penstock.planner.common.errors import UserError

SYS_DEV = Path("/sys/dev/block")


def check_device(path: Path, force: bool) -> None:
    """UserError if ``path`` is no block device, if ``force`` is not given, or if it is in use. In use means: it, a partition of it, or its
    parent is mounted, swapped to or held by another device."""
    try:
        info = os.stat(path)
    except OSError as error:
        raise UserError(f"device={path}: {error.strerror}; name a block device such as /dev/nvme1n1") from error
    if not stat.S_ISBLK(info.st_mode):
        raise UserError(f"device={path}: not a block device; leave device out to pack into a file")
    user = device_user(os.major(info.st_rdev), os.minor(info.st_rdev))
    if user:
        raise UserError(f"device={path}: {user}; a device in use is never written, name another")
    if not force:
        raise UserError(f"device={path}: everything on it would be overwritten; add force=true if that is meant")


def open_device(path: Path, force: bool) -> int:
    """A descriptor to write the block device ``path``, which the kernel grants to nobody else while it is open. UserError as
    :func:`check_device`'s."""
    check_device(path, force)
    try:
        return os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
    except OSError as error:
        why = "in use" if error.errno == errno.EBUSY else error.strerror
        raise UserError(f"device={path}: cannot be opened for writing ({why}); name another or ask for permission") from error


def device_user(major: int, minor: int) -> str | None:
    """What uses the device, its partitions or the disk that it is a part of; None when nothing does."""
    related = _related(major, minor)
    for line in _lines(Path("/proc/self/mountinfo")):
        fields = line.split()
        if len(fields) > 4 and fields[2] in related:
            return f"{_name(fields[2])} is mounted at {fields[4]}"
    for line in _lines(Path("/proc/swaps"))[1:]:
        swap = Path(line.split()[0])
        if swap.exists() and stat.S_ISBLK(swap.stat().st_mode) and _number(swap.stat().st_rdev) in related:
            return f"{swap} is swap space"
    for number in sorted(related):
        holders = SYS_DEV / number / "holders"
        held_by = sorted(os.listdir(holders)) if holders.is_dir() else []
        if held_by:
            return f"{_name(number)} is held by {', '.join(held_by)}"
    return None


def _related(major: int, minor: int) -> set[str]:
    """The device, its partitions, and the disk that it is a partition of, as MAJOR:MINOR."""
    number = f"{major}:{minor}"
    found = {number}
    place = SYS_DEV / number
    if place.exists():
        place = place.resolve()
        found |= {text for child in place.glob("*/partition") if (text := _dev(child.parent))}
        if (place / "partition").exists() and (text := _dev(place.parent)):
            found.add(text)
    return found


def _dev(place: Path) -> str:
    return (place / "dev").read_text().strip() if (place / "dev").exists() else ""


def _name(number: str) -> str:
    place = SYS_DEV / number
    return f"/dev/{place.resolve().name}" if place.exists() else number


def _number(rdev: int) -> str:
    return f"{os.major(rdev)}:{os.minor(rdev)}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
