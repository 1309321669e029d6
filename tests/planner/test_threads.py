"""Cores for products: fast and whole ones first, from every node, within what a container gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.planner.common.threads import best_cores, most_threads, thread_cache_bytes


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    return tmp_path


def made(root: Path, allowed: str, siblings: dict[int, str], nodes: dict[int, int] | None = None, fast: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(f"Name:\tx\nCpus_allowed_list:\t{allowed}\n")
    for core, shared in siblings.items():
        cpu = root / f"sys/devices/system/cpu/cpu{core}"
        (cpu / "topology").mkdir(parents=True)
        (cpu / "topology/thread_siblings_list").write_text(shared + "\n")
        (cpu / f"node{(nodes or {}).get(core, 0)}").mkdir()
    if fast:
        (root / "sys/devices/cpu_core").mkdir(parents=True)
        (root / "sys/devices/cpu_core/cpus").write_text(fast + "\n")
    return root


def test_second_hardware_threads_come_last(machine: Path) -> None:
    made(machine, "0-7", {n: f"{n % 4},{n % 4 + 4}" for n in range(8)})
    assert best_cores(machine) == [3, 2, 1, 0, 7, 6, 5, 4]


def test_a_core_of_which_only_the_second_hardware_thread_is_allowed_is_a_whole_one(machine: Path) -> None:
    made(machine, "1-4", {n: f"{n % 4},{n % 4 + 4}" for n in range(8)})
    assert best_cores(machine) == [4, 3, 2, 1]


def test_slow_cores_of_a_hybrid_processor_come_last(machine: Path) -> None:
    made(machine, "0-5", {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5"}, fast="0-3")
    assert best_cores(machine) == [2, 0, 3, 1, 5, 4]


def test_nodes_take_turns(machine: Path) -> None:
    made(machine, "0-5", {n: str(n) for n in range(6)}, {n: n // 3 for n in range(6)})
    assert best_cores(machine) == [2, 5, 1, 4, 0, 3]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 14)])
def test_products_leave_cores_to_the_others(machine: Path, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    made(machine, f"0-{cores - 1}", {n: str(n) for n in range(cores)})
    assert most_threads(machine) == threads


def test_a_hybrid_processor_multiplies_with_its_fast_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    made(machine, "0-11", {n: f"{n // 2 * 2}-{n // 2 * 2 + 1}" if n < 8 else str(n) for n in range(12)}, fast="0-7")
    assert most_threads(machine) == 2


def test_without_a_word_from_the_kernel_there_is_one_thread_at_least(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert (best_cores(machine), most_threads(machine)) == ([], 1)


@pytest.mark.parametrize(
    ("caches", "nbytes"),
    [
        ({}, 0),
        ({"0": "2048K", "1": "2048K"}, 2 << 20),
        ({"0,2": "2048K", "1,3": "2048K"}, 1 << 20),
        ({"0-1": "2M", "4-7": "4M"}, 1 << 20),
    ],
)
def test_a_thread_has_its_part_of_the_cache_that_a_core_has_for_its_own(machine: Path, caches: dict[str, str], nbytes: int) -> None:
    """Of fast and slow cores the least; what all cores share is not counted."""
    for shared, size in caches.items():
        for level, held in ((2, size), (3, "300M")):
            cache = machine / f"sys/devices/system/cpu/cpu{shared[0]}/cache/index{level}"
            cache.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", held), ("shared_cpu_list", shared)):
                (cache / name).write_text(text + "\n")
    assert thread_cache_bytes(machine) == nbytes
