"""The CPU: cores that this process may use, and their clocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from penstock.planner.common.cgroup import read_text
from penstock.planner.common.host_memory import usable_cores
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.policies.native import unbuilt
from penstock.planner.doctor.finding import Finding, Verdict

SLOW = ("powersave", "conservative", "ondemand", "userspace")
"""Governors that hold clocks down, where the driver does not choose them itself."""
OWN_CHOICE = ("intel_pstate", "amd-pstate-epp")
"""Drivers whose `powersave` raises clocks under load by themselves."""


def processor_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Cores and governor."""
    yield _cores(usable_cores(root), os.cpu_count() or 1)
    yield _governor(root / "sys/devices/system/cpu")
    yield _policies()


def _policies() -> Finding:
    if said := unbuilt(ExpertPolicyName.mix):
        return Finding("policies", "not compiled", Verdict.fair, said)
    return Finding("policies", "of experts, compiled", Verdict.good)


def _cores(usable: int, present: int) -> Finding:
    if usable < present:
        change = "raise the container's CPU quota or the affinity: reading, page-locking and a model on the CPU use all cores"
        return Finding("cores", f"{usable} of {present}", Verdict.fair, change)
    return Finding("cores", str(usable), Verdict.good)


def _governor(cpus: Path) -> Finding:
    governors = {text.strip() for file in cpus.glob("cpu[0-9]*/cpufreq/scaling_governor") if (text := read_text(file))}
    drivers = {text.strip() for file in cpus.glob("cpu[0-9]*/cpufreq/scaling_driver") if (text := read_text(file))}
    if not governors:
        return Finding("CPU governor", "the kernel does not say", Verdict.unknown)
    found = ", ".join(sorted(governors)) + (f" ({', '.join(sorted(drivers))})" if drivers else "")
    if governors & set(SLOW) and not (drivers and drivers <= set(OWN_CHOICE)):
        change = "cpupower frequency-set -g performance (root): kernels are launched, and layers computed on the CPU, at full clock"
        return Finding("CPU governor", found, Verdict.fair, change)
    return Finding("CPU governor", found, Verdict.good)
