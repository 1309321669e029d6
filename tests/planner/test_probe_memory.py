"""How much DRAM a plan may use, on machines that are only files."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.planner.common.cgroup import cpu_quota, groups, memory_limit
from penstock.planner.common.host_memory import (
    MARGIN_LEAST_BYTES,
    MemoryFacts,
    last_level_cache_bytes,
    memory_facts,
    sampled_bytes,
    uncached_bytes,
)

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def facts(**changed: object) -> MemoryFacts:
    usual = dict(mem_total=32 * GIB, mem_available=30 * GIB, blocks_bytes=0, cgroup_limit=None, cgroup_room=None, virtual=True)
    return MemoryFacts(**{**usual, **changed})


def test_the_lowest_version_2_limit_of_all_ancestors_counts(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "proc/self/mountinfo": "25 1 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    assert memory_limit(root) == (8 * GIB, 6 * GIB)


def test_a_version_1_limit_is_found_through_the_mounted_root_of_a_container(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n",
            "proc/self/mountinfo": (
                "30 1 0:1 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
                "31 1 0:2 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n"
            ),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limit(root) == (4 * GIB, 3 * GIB)
    assert cpu_quota(root) == 1.5


def test_the_kernels_huge_number_is_no_limit(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "proc/self/mountinfo": "30 1 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert memory_limit(root) == (None, None)


def test_a_machine_without_control_groups_has_no_groups(tmp_path):
    assert groups("memory", tmp_path) == []
    assert memory_limit(tmp_path) == (None, None)


def test_a_limit_below_the_machines_memory_bounds_the_plan():
    found = facts(cgroup_limit=8 * GIB, cgroup_room=8 * GIB)
    assert found.total_bytes == 8 * GIB
    assert found.plan_bytes == 8 * GIB - MARGIN_LEAST_BYTES


def test_a_virtual_machine_is_trusted_up_to_a_finite_limit_above_its_memtotal():
    found = facts(mem_total=31 * GIB, mem_available=30 * GIB, cgroup_limit=255 * GIB, cgroup_room=254 * GIB)
    assert found.total_bytes == 255 * GIB
    assert found.plan_bytes == 254 * GIB - found.margin_bytes


def test_a_virtual_machine_is_trusted_up_to_the_memory_blocks_that_it_lists():
    assert facts(blocks_bytes=256 * GIB).machine_bytes == 256 * GIB


def test_blocks_that_exceed_memtotal_by_what_the_kernel_keeps_are_no_growth():
    assert facts(blocks_bytes=33 * GIB).machine_bytes == 32 * GIB


def test_on_bare_metal_a_limit_above_memtotal_adds_nothing():
    found = facts(virtual=False, cgroup_limit=255 * GIB, cgroup_room=255 * GIB)
    assert found.total_bytes == 32 * GIB
    assert found.plan_bytes == 30 * GIB - found.margin_bytes


def test_memory_that_others_use_is_not_planned_with():
    assert facts(mem_available=10 * GIB).plan_bytes == 10 * GIB - facts().margin_bytes


def test_a_machine_with_nothing_free_leaves_nothing_and_no_negative_number():
    assert facts(mem_available=0).plan_bytes == 0


def test_the_facts_are_read_from_the_kernels_files(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {30 * GIB // 1024} kB\n",
            "proc/cpuinfo": "flags\t\t: fpu hypervisor\n",
            "sys/devices/system/memory/block_size_bytes": "8000000\n",
            "sys/devices/system/memory/memory0/state": "online\n",
            "sys/devices/system/memory/memory1/state": "offline\n",
        },
    )
    assert memory_facts(root) == facts(blocks_bytes=2 * 0x8000000)


@pytest.mark.parametrize(("shared", "total"), [(("0-1", "0-1"), 260 * 2**20), (("0", "1"), 520 * 2**20)])
def test_a_cache_shared_by_cores_counts_once(tmp_path, shared, total):
    cache = "sys/devices/system/cpu/cpu{}/cache/index{}/{}"
    files = {}
    for cpu in (0, 1):
        for index, level, size, who in ((2, "2", "2048K", str(cpu)), (3, "3", "266240K", shared[cpu])):
            names = {"level": level, "size": size, "shared_cpu_list": who}
            files |= {cache.format(cpu, index, name): text + "\n" for name, text in names.items()}
    assert last_level_cache_bytes(write(tmp_path, files)) == total


@pytest.mark.parametrize(
    ("cache", "free", "bound"),
    [
        (None, 64 * GIB, "least"),
        ("32M", 64 * GIB, "least"),
        ("307200K", 200 * GIB, "turns"),
        ("307200K", 16 * GIB, "share"),
        ("307200K", 4 * GIB, "least"),
    ],
)
def test_what_takes_turns_is_sixteen_caches_as_far_as_memory_allows(tmp_path, cache, free, bound):
    files = {"proc/meminfo": f"MemTotal: {free // 1024} kB\nMemAvailable: {free // 1024} kB\n"}
    if cache:
        place = "sys/devices/system/cpu/cpu0/cache/index3/"
        files |= {place + name: text for name, text in {"level": "3", "size": cache, "shared_cpu_list": "0-31"}.items()}
    root = write(tmp_path, files)
    assert sampled_bytes(root) == max(GIB, memory_facts(root).plan_bytes // 8)
    assert uncached_bytes(root) == {"least": GIB, "turns": 16 * 300 * 2**20, "share": memory_facts(root).plan_bytes // 8}[bound]
