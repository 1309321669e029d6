"""What stands in the way of the CPU's products: instructions that are hidden, cores that are shared, time that a container takes back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from penstock.planner.common.cgroup import cpu_quota, groups, read_text
from penstock.planner.common.threads import allowed_cores, numbers
from penstock.planner.doctor.finding import Finding, Verdict

HAS_AVX512 = re.compile(r"Xeon\(R\) (Platinum|Gold|Silver|Bronze|w\d)|EPYC 9")
"""Names of which every processor has AVX-512."""
LACKS_AVX512 = re.compile(r"EPYC 7|Ryzen .*\b[1-6]\d{3}|Xeon\(R\)( CPU)? E[357]-|1[2-4]th Gen Intel\(R\) Core")
"""Names of which no processor has it: a virtual machine that hides none shows none."""
WIDEST = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Flags of the instruction sets that products are written for, the widest first."""
SAID = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
TILED = "avx512_fp16"
"""Intel's processors with this flag have AMX."""
THROTTLED = 0.01
"""Share of scheduling periods in which a container was stopped that is worth a word."""


def products_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Instructions, hardware threads, and how often the container was stopped. ``root`` is the file system's (tests give a false one)."""
    yield _instructions(read_text(root / "proc/cpuinfo") or "")
    yield from _threads(root / "sys/devices/system/cpu", allowed_cores(root))
    yield from _throttled(root)


def _instructions(info: str) -> Finding:
    name = _line(info, "model name")
    flags = frozenset(_line(info, "flags").split())
    found = next((SAID[flag] for flag in WIDEST if flag in flags), "")
    if not flags:
        return Finding("instructions", "the kernel does not say", Verdict.unknown)
    if not found:
        change = "give the virtual machine its host's processor (qemu -cpu host): without AVX2 the CPU multiplies slower than DRAM reads"
        return Finding("instructions", "none of AVX2 and up", Verdict.fair, change)
    hidden = HAS_AVX512.search(name) or ("hypervisor" in flags and not LACKS_AVX512.search(name))
    if "avx512f" not in flags and hidden:
        where = "give the virtual machine its host's processor (qemu -cpu host)" if "hypervisor" in flags else "turn AVX-512 on in the BIOS"
        return Finding("instructions", f"{found}, no AVX-512", Verdict.fair, f"{where}: a product of several rows takes longer without")
    if TILED in flags and "amx_bf16" not in flags:
        change = "take Linux 5.16 or later, and a virtual machine with AMX: a product of 16 rows then costs what one row does"
        return Finding("instructions", f"{found}, AMX is hidden", Verdict.fair, change)
    return Finding("instructions", found, Verdict.good)


def _threads(cpus: Path, allowed: frozenset[int]) -> Iterator[Finding]:
    """Hardware threads that share a core, where this process was given a part of the machine."""
    sets = {n: numbers(text) for n in allowed if (text := read_text(cpus / f"cpu{n}/topology/thread_siblings_list"))}
    cores = len({min(siblings) for siblings in sets.values() if siblings})
    if not cores or cores == len(sets):
        return
    found = f"{len(sets)} hardware threads on {cores} cores"
    if len(allowed) < len(numbers(read_text(cpus / "online"))):
        change = "give the container whole cores, one hardware thread of each (cpuset.cpus): two on a core multiply like one"
        yield Finding("SMT", found, Verdict.fair, change)
    else:
        yield Finding("SMT", found, Verdict.good)


def _throttled(root: Path) -> Iterator[Finding]:
    """Of the process's groups, the one that was stopped most often."""
    quota = cpu_quota(root)
    shares = []
    for group in groups("cpu", root):
        stat = dict(line.split() for line in (read_text(group / "cpu.stat") or "").splitlines() if len(line.split()) == 2)
        if int(stat.get("nr_periods", "0")):
            shares.append(int(stat.get("nr_throttled", "0")) / int(stat["nr_periods"]))
    if quota is None:
        return
    found = f"time of {quota:.3g} cores" + (f", stopped in {max(shares):.0%} of periods" if shares else "")
    if max(shares, default=0.0) > THROTTLED:
        change = "give the container a set of cores in place of a quota (docker run --cpuset-cpus): threads that spin are stopped together"
        yield Finding("CPU quota", found, Verdict.fair, change)
    else:
        yield Finding("CPU quota", found, Verdict.good)


def _line(info: str, key: str) -> str:
    match = re.search(rf"^{key}\s*:\s*(.*)$", info, re.MULTILINE)
    return match.group(1) if match else ""
