"""Compute threads: on which cores they run, and how they wait for each other."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.planner.common.cgroup import read_text
from penstock.planner.common.host_memory import caches, usable_cores

LEFT = 2
"""Cores that products leave where there are more than so many: to the interpreter with its driver, and to whoever reads."""


def allowed_cores(root: Path = Path("/")) -> frozenset[int]:
    """Numbers of the hardware threads that this process may run on."""
    match = re.search(r"^Cpus_allowed_list:\s+(\S+)", read_text(root / "proc/self/status") or "", re.MULTILINE)
    return numbers(match and match.group(1))


def numbers(text: str | None) -> frozenset[int]:
    """``0-3,8`` as the kernel writes it."""
    spans = (part.partition("-") for part in (text or "").strip().split(",") if part)
    return frozenset(n for first, _, last in spans for n in range(int(first), int(last or first) + 1))


def best_cores(root: Path = Path("/")) -> list[int]:
    """Allowed hardware threads, the best for a product first.

    Fast cores come before slow ones, and whole cores before the second hardware thread of one. Nodes take turns, since each brings its own
    memory. Of equal ones the last comes first: interrupts and other programs tend to the first.
    """
    cpus = root / "sys/devices/system/cpu"
    fast = numbers(read_text(root / "sys/devices/cpu_core/cpus"))
    turns: dict[tuple[bool, int, int], int] = {}
    keys = {}
    for core in sorted(allowed_cores(root), reverse=True):
        siblings = sorted(numbers(read_text(cpus / f"cpu{core}/topology/thread_siblings_list")) & allowed_cores(root)) or [core]
        node = next((int(d.name.removeprefix("node")) for d in (cpus / f"cpu{core}").glob("node[0-9]*")), 0)
        kind = bool(fast) and core not in fast, siblings.index(core)
        turns[*kind, node] = turn = turns.get((*kind, node), -1) + 1
        keys[core] = (*kind, turn, node)
    return sorted(keys, key=lambda core: keys[core])


def most_threads(root: Path = Path("/")) -> int:
    """Threads for products at most: a core for each, within the container's quota, less ``LEFT`` where there are more; on a hybrid
    processor of fast cores alone, since all wait for the slowest. At least 1."""
    cpus = root / "sys/devices/system/cpu"
    fast = numbers(read_text(root / "sys/devices/cpu_core/cpus"))
    allowed = allowed_cores(root)
    kept = allowed & fast or allowed
    whole = {min(numbers(read_text(cpus / f"cpu{core}/topology/thread_siblings_list")) & kept or {core}) for core in kept}
    found = min(len(whole), usable_cores(root)) if whole else usable_cores(root)
    return max(1, found - LEFT if found > LEFT else found - 1)


def wait_asleep() -> None:
    """Let OpenMP's threads sleep while they wait instead of spinning. Call before torch is imported; a user's own setting stays.

    A spinning thread takes the core that the reader of weights needs. A decode step of the demo's geometry on two cores takes 276 ms
    spinning and 146 ms asleep beside one busy neighbour. Alone it takes 82 ms spinning and 125 to 139 asleep, since a wake-up costs some 80
    µs. So a model that lies in DRAM as a whole spins.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def thread_cache_bytes(root: Path = Path("/")) -> int:
    """Bytes that a hardware thread has of its core's second-level cache, of all threads the least; 0 where the kernel does not say."""
    second = [(size, len(numbers(shared))) for (level, shared), size in caches(root).items() if level == 2]
    return min((size // max(1, threads) for size, threads in second), default=0)
