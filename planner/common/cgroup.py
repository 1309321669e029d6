"""Where this process stands in the control groups, both versions, from its own group up to the root of the mount."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

UNLIMITED_BYTES = 2**60
"""A v1 limit at or above this is the kernel's way of saying that there is none."""


def read_text(path: Path) -> str | None:
    """The file's text, or None where the kernel has no such file or does not let us read it."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _mounts(root: Path) -> list[tuple[str, str, str, str]]:
    """(mounted root, mount point, file system type, super options) of every mount."""
    rows = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) >= 5 and len(tail) >= 3:
            rows.append((fields[3], fields[4], tail[0], tail[2]))
    return rows


def groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Directories that may hold ``controller``'s files for this process: its own group first, then each ancestor's.

    ``root`` is the root of the file system (tests give a false one). Empty where control groups are not mounted.
    """
    found: list[Path] = []
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        second = number == "0" and names == ""
        if not second and controller not in names.split(","):
            continue
        for mounted, point, kind, options in _mounts(root):
            if not (kind == "cgroup2" if second else kind == "cgroup" and controller in options.split(",")):
                continue
            inside = PurePosixPath(path.lstrip("/"))
            below = mounted.strip("/")
            if below and (path.strip("/") + "/").startswith(below + "/"):
                inside = PurePosixPath(path.strip("/")[len(below) :].lstrip("/"))
            top = root / point.lstrip("/")
            found += [top / level for level in (inside, *inside.parents) if ".." not in level.parts]
    return list(dict.fromkeys(found))


def _number(path: Path) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdigit() and int(text) < UNLIMITED_BYTES else None


def memory_limit(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """(lowest limit, least room left under any limit) of the groups, in bytes; None where nothing limits.

    Room is the limit less what is used, with the file cache that can be dropped counted as room.
    ``memory.high`` counts as a limit: past it the kernel stalls the process.
    """
    limits, rooms = [], []
    for group in groups("memory", root):
        stated = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        bounds = [bound for bound in stated if bound is not None]
        if not bounds:
            continue
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
        stat = dict(line.split() for line in (read_text(group / "memory.stat") or "").splitlines() if len(line.split()) == 2)
        droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
        limits.append(min(bounds))
        rooms.append(max(0, min(bounds) - max(0, used - droppable)))
    return (min(limits), min(rooms)) if limits else (None, None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the groups allow, or None where nothing limits."""
    quotas = []
    for group in groups("cpu", root):
        second = (read_text(group / "cpu.max") or "").split()
        if len(second) == 2 and second[0].isdigit():
            quotas.append(int(second[0]) / int(second[1]))
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota and period:
            quotas.append(quota / period)
    return min(quotas) if quotas else None
