"""DRAM: how much is free, and what the kernel does with it."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

from penstock.planner.common.cgroup import read_text
from penstock.planner.common.host_memory import MemoryFacts, memory_facts
from penstock.planner.common.measures import GB, show_bytes
from penstock.planner.doctor.finding import Finding, Verdict

LEAST_BYTES = 512 * 2**20
"""What torch and transformers take before the first weight."""
FREE_SHARE = 0.8
"""Less of the machine's DRAM than this free is worth a word."""
CAP_IPC_LOCK = 14
"""The bit of the capability that lifts the page-locking limit (capabilities(7))."""
SWAPPED_BYTES = GB
"""More than this swapped out says that DRAM is short."""


def memory_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Free memory, the control group's limit, page-locking, huge pages, swap. ``root`` is the file system's (tests give a false one)."""
    facts = memory_facts(root)
    yield _free(facts)
    yield _limit(facts)
    yield _locking(facts, *resource.getrlimit(resource.RLIMIT_MEMLOCK), _may_lock(read_text(root / "proc/self/status") or ""))
    yield _huge_pages(read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    info = read_text(root / "proc/meminfo") or ""
    yield from _reserved(_size(info, "HugePages_Total", 1), _size(info, "Hugepagesize"))
    yield _swap(_size(info, "SwapTotal"), _size(info, "SwapFree"))


def _size(info: str, key: str, factor: int = 1024) -> int:
    match = re.search(rf"^{key}:\s+(\d+)", info, re.MULTILINE)
    return int(match.group(1)) * factor if match else 0


def _may_lock(status: str) -> bool:
    match = re.search(r"^CapEff:\s+([0-9a-f]+)", status, re.MULTILINE)
    return bool(match and int(match.group(1), 16) >> CAP_IPC_LOCK & 1)


def _free(facts: MemoryFacts) -> Finding:
    usable, total = facts.plan_bytes, facts.total_bytes
    found = f"{show_bytes(usable)} of {show_bytes(total)} for a plan"
    if usable < LEAST_BYTES:
        return Finding("DRAM", found, Verdict.stops, f"end other processes: a run takes {show_bytes(LEAST_BYTES)} before its first weight")
    if usable < FREE_SHARE * total:
        return Finding("DRAM", found, Verdict.fair, "end other processes: each GB keeps weights that are read from the SSD otherwise")
    return Finding("DRAM", found, Verdict.good)


def _limit(facts: MemoryFacts) -> Finding:
    limit = facts.cgroup_limit
    if limit is None:
        return Finding("cgroup limit", "none", Verdict.good)
    found = f"{show_bytes(limit)}, {show_bytes(facts.cgroup_room or 0)} of it free"
    if limit >= facts.mem_total:
        return Finding("cgroup limit", found, Verdict.good)
    change = f"raise the container's memory (docker run --memory, memory.max): the machine has {show_bytes(facts.mem_total)}"
    return Finding("cgroup limit", found, Verdict.fair, change)


def _locking(facts: MemoryFacts, soft: int, hard: int, privileged: bool) -> Finding:
    """NVIDIA's Linux module locks pages without this limit: kernel-open/nvidia/os-mlock.c calls pin_user_pages alone. Without a card,
    page-locking is measured by mlock. The limit holds for mlock unless the process has CAP_IPC_LOCK."""
    found = "unlimited" if soft == resource.RLIM_INFINITY else show_bytes(soft)
    if soft == resource.RLIM_INFINITY or soft >= facts.total_bytes:
        return Finding("page-locking", found, Verdict.good)
    if privileged:
        return Finding("page-locking", f"{found}, not asked of this user", Verdict.good)
    how = "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else "set LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1"
    change = f"{how}: NVIDIA's driver does not count this limit, but `planner probe` without a card meets it"
    return Finding("page-locking", found, Verdict.fair, change)


def _huge_pages(text: str | None) -> Finding:
    if text is None:
        return Finding("huge pages", "the kernel does not say", Verdict.unknown)
    match = re.search(r"\[(\w+)\]", text)
    mode = match.group(1) if match else text.strip()
    if mode in ("always", "madvise"):
        return Finding("huge pages", f"transparent, {mode}", Verdict.good)
    change = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (root): memory is faulted in and page-locked sooner"
    return Finding("huge pages", f"transparent, {mode}", Verdict.fair, change)


def _reserved(pages: int, page_bytes: int) -> Iterator[Finding]:
    if pages:
        change = "sysctl vm.nr_hugepages=0 (root), unless another program needs them: no plan can use them"
        yield Finding("reserved pages", f"{show_bytes(pages * page_bytes)} in huge pages", Verdict.fair, change)


def _swap(total: int, free: int) -> Finding:
    if not total:
        return Finding("swap", "none", Verdict.good)
    used, found = total - free, f"{show_bytes(total - free)} of {show_bytes(total)} in use"
    if used > SWAPPED_BYTES:
        change = "end what is too large, or swapoff -a (root): weights that are swapped out are read twice"
        return Finding("swap", found, Verdict.fair, change)
    return Finding("swap", found, Verdict.good)
