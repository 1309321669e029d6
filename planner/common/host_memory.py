"""How much DRAM a plan may use, and the processor's shape: read from the kernel, nothing timed.

``dram_bytes`` is the least of

* the container's limit, if it is below the machine's memory;
* what is free now, plus what can still grow, less a margin.

A virtual machine may show less memory than it has: memory is plugged in, or a balloon returns it, as it is used (MemTotal 31 GiB now, 255
GiB later). So its size is the largest of MemTotal, a finite cgroup limit, and the memory blocks that the kernel lists. The latter two count
only if they exceed MemTotal by more than what a kernel keeps for itself.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.common.cgroup import cpu_quota, memory_limit, read_text
from penstock.planner.common.measures import show_bytes

GROWTH_FACTOR = 1.1
"""A size above MemTotal by more than this is memory still to come; below it is what the kernel reserves (2 to 6 %)."""
MARGIN_SHARE = 0.02
MARGIN_LEAST_BYTES = 256 * 2**20
"""DRAM left alone: a share of the machine's, and at least this much."""
CACHE_TURNS = 16
"""Bytes read in turns are so many times the last-level cache. It keeps what it has, so of N times as much it answers for about 1/N: on a
host with 300 MiB of it 0.7 GB were read at 274 GB/s, and 6.3 GB at 149."""
UNCACHED_LEAST_BYTES = 2**30
"""Where the cache is small, or a virtual machine shows another one than there is."""
SAMPLED_SHARE = 8
"""One part in so many of what a plan could use is read where it is to answer for all."""


@dataclass(frozen=True)
class MemoryFacts:
    """What the kernel says of DRAM, in bytes. None means that nothing limits."""

    mem_total: int
    mem_available: int
    blocks_bytes: int
    """Memory blocks that the kernel lists, online or offline; 0 where it lists none."""
    cgroup_limit: int | None
    cgroup_room: int | None
    virtual: bool
    """Whether this is a virtual machine, whose MemTotal may grow."""

    @property
    def machine_bytes(self) -> int:
        """The machine's size, grown to what it is configured for."""
        larger = [size for size in (self.blocks_bytes, self.cgroup_limit or 0) if size > GROWTH_FACTOR * self.mem_total]
        return max([self.mem_total, *larger]) if self.virtual else self.mem_total

    @property
    def total_bytes(self) -> int:
        """What this process may ever hold: the machine's size or the container's limit."""
        return min(self.machine_bytes, self.cgroup_limit or self.machine_bytes)

    @property
    def margin_bytes(self) -> int:
        return max(MARGIN_LEAST_BYTES, round(MARGIN_SHARE * self.total_bytes))

    @property
    def plan_bytes(self) -> int:
        """What a plan may use: the total, bounded by what is free now or can still grow, less the margin."""
        free = self.mem_available + self.machine_bytes - self.mem_total
        room = free if self.cgroup_room is None else min(free, self.cgroup_room)
        return max(0, min(self.total_bytes, room) - self.margin_bytes)

    def describe(self) -> str:
        """One line for the profile."""
        limit = "none" if self.cgroup_limit is None else show_bytes(self.cgroup_limit)
        grown = f", grows to {show_bytes(self.machine_bytes)}" if self.machine_bytes > self.mem_total else ""
        return (
            f"MemTotal {show_bytes(self.mem_total)}{grown}, available {show_bytes(self.mem_available)}, "
            f"cgroup limit {limit}, margin {show_bytes(self.margin_bytes)}"
        )


def memory_facts(root: Path = Path("/")) -> MemoryFacts:
    """Read the facts under ``root`` (the file system's root; tests give a false one)."""
    info = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        if rest.split():
            info[key] = int(rest.split()[0]) * 1024
    limit, room = memory_limit(root)
    return MemoryFacts(
        mem_total=info.get("MemTotal", 0),
        mem_available=info.get("MemAvailable", info.get("MemFree", 0)),
        blocks_bytes=_blocks_bytes(root),
        cgroup_limit=limit,
        cgroup_room=room,
        virtual=_virtual(root),
    )


def _blocks_bytes(root: Path) -> int:
    memory = root / "sys/devices/system/memory"
    size = read_text(memory / "block_size_bytes")
    return int(size, 16) * len(list(memory.glob("memory[0-9]*"))) if size else 0


def _virtual(root: Path) -> bool:
    flags = read_text(root / "proc/cpuinfo") or ""
    return " hypervisor" in flags or (root / "sys/hypervisor/type").exists()


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: its affinity, and the cgroup's quota rounded up."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def caches(root: Path) -> dict[tuple[int, str], int]:
    """Bytes of each cache that the kernel tells of, by level and the hardware threads that share it."""
    found: dict[tuple[int, str], int] = {}
    for index in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        level, size, shared = (read_text(index / name) for name in ("level", "size", "shared_cpu_list"))
        if level and size and shared:
            factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size.strip()[-1], 1)
            found[int(level), shared.strip()] = int(size.strip().rstrip("KMG")) * factor
    return found


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Bytes of the last-level caches of all sockets together; 0 where the kernel does not say."""
    found = caches(root)
    top = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == top)


def sampled_bytes(root: Path = Path("/"), least_bytes: int = UNCACHED_LEAST_BYTES) -> int:
    """How many bytes are read where they are to answer for a run's whole arena. Memory is not the same everywhere: two links at once
    carried 107 GB/s out of 1 GiB each, 99 out of 16 GiB each, and 103 in a run of 22 GB each (two H200s of one virtual machine)."""
    return max(least_bytes, memory_facts(root).plan_bytes // SAMPLED_SHARE)


def uncached_bytes(root: Path = Path("/"), least_bytes: int = UNCACHED_LEAST_BYTES) -> int:
    """How many bytes take turns where DRAM's rate is asked, so that the last-level cache has next to nothing of them."""
    return min(max(least_bytes, CACHE_TURNS * last_level_cache_bytes(root)), sampled_bytes(root, least_bytes))
