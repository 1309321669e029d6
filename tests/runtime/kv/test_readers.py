"""Any number of processes read beside the one that writes."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.planner.contract.config.config_schema import ForceConfig
from penstock.planner.contract.decided.decisions import KvPages
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.kv.disk.disk_pages import DiskReader
from penstock.runtime.kv.disk.kept_rate import measure_reading
from tests.runtime.kv.batches import TOKENS, served
from tests.runtime.kv.nursery import Nursery
from tests.runtime.kv.pages import SHAPE, open_writer, put
from tests.runtime.kv.pages import served as read_back
from tests.runtime.running import Desk, desk
from tests.support import decisions, machine, plan_for, save_tiny, workload

STEM = [(7 * i) % 251 + 1 for i in range(100)]
WORK = {"prompt_tokens": 100, "max_new_tokens": 4, "force": ForceConfig(page_tokens=32)}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: hashlib.blake2b(path.read_bytes()).digest() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("readers"))


@pytest.fixture
def here(checkpoint: Path, tmp_path: Path) -> Desk:
    (tmp_path / "desk").mkdir()
    return desk(tmp_path / "desk", plan_for(checkpoint, decisions(batch=2, pages=20), work=workload(prompt_tokens=100, requests=2)))


def test_a_run_that_only_reads_restores_beside_a_writer_and_changes_nothing(here: Desk, tmp_path: Path, nursery: Nursery) -> None:
    kv = tmp_path / "kv"
    want = here.run(**WORK, kv=ReuseConfig(dir=str(kv), read_gbps=1e9))
    pid = nursery.hold(kv)
    refused = here.refusal(**WORK, kv=ReuseConfig(dir=str(kv)))
    assert f"process {pid} of host" in refused and "set kv.read_only=true" in refused
    before = contents(kv)
    got = here.run(**WORK, kv=ReuseConfig(dir=str(kv), read_only=True, read_gbps=1e9), rounds=2)
    nursery.kill(pid)
    assert got["tokens"] == want["tokens"]
    reused = got["kv_reuse"]
    assert reused["restored_tokens"] == {"vram": 0, "dram": 192, "ssd": 192}, "what was read stays in this process's DRAM"
    assert reused["pages_written"] == 0 == reused["failures"] and contents(kv) == before


def test_what_a_run_that_only_reads_computes_stays_in_its_own_memory(here: Desk, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    got = here.run(**WORK, kv=ReuseConfig(dir=str(tmp_path / "kv"), read_only=True), rounds=2)
    assert got["kv_reuse"]["restored_tokens"] == {"vram": 0, "dram": 192, "ssd": 0} and got["kv_reuse"]["pages_captured"] == 6
    assert got["kv_reuse"]["pages_skipped"] == 0 and not list((tmp_path / "kv").iterdir())
    assert got["kv_reuse"]["read_gbps"] is None and "Infinity" not in here.out.read_text(), "there is nothing whose rate could be measured"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"dir": None}, "kv.read_only=true: there is no directory to read; set kv.dir"),
        ({"dir": "nowhere"}, "not a directory that can be read; name one that holds pages, or leave kv.read_only out"),
        ({"dir": "file"}, "not a directory that can be read"),
    ],
)
def test_nothing_to_read_is_refused_in_one_line(
    here: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str | None], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert said in here.refusal(**WORK, kv=ReuseConfig(**keys, read_only=True))
    assert not (tmp_path / "nowhere").exists()


def test_a_reader_meets_only_right_pages_while_a_writer_adds_and_evicts(tmp_path: Path, nursery: Nursery) -> None:
    pid = nursery.start("write_forever", directory=str(tmp_path), start=0, universe=64, pages=16, segment_pages=4)
    reader = DiskReader(tmp_path, SHAPE, warn=lambda line: None)
    deadline, seen = time.monotonic() + 60, set()
    while reader.counters()["failed_missing"] < 5 or len(seen) < 16:
        assert time.monotonic() < deadline, f"{len(seen)} pages, {reader.counters()}"
        seen.update(read_back(reader, *range(64)))
        reader.refresh()
    nursery.kill(pid)
    assert {name for name, count in reader.counters().items() if name.startswith("failed") and count} <= {"failed_missing"}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of a model so slow that every page is worth its way."""
    made = plan_for(save_tiny(tmp_path_factory.mktemp("slow"), layers=3), decisions(batch=3), work=workload(prompt_tokens=150))
    return replace(made, hardware=replace(made.hardware, cpu_dense_tflops=1e-6))


def on_card(plan: Plan) -> Plan:
    hardware = machine(True)
    made = replace(plan.decisions, kv=KvPages(TOKENS, 96, 0, 0))
    return replace(plan, hardware=replace(hardware, gpu=replace(hardware.gpu, dense_tflops=1e-6)), decisions=made)


@pytest.mark.parametrize("choose", [None, lambda enabled: enabled[0]], ids=["cpu", "card"])
def test_pages_that_another_process_removed_meanwhile_are_computed_and_counted_once(
    slow: Plan, tmp_path: Path, nursery: Nursery, choose: Callable | None
) -> None:
    plan = on_card(slow) if choose else slow
    with served(plan, tmp_path, choose) as run:
        run.batch([STEM])
    with served(plan, tmp_path, choose, read_only=True) as run:
        assert nursery.wait(nursery.start("clear", directory=str(tmp_path))) == 0
        assert run.batch([STEM]) == [0]
        run.prefix.forget()
        assert run.batch([STEM]) == [96]
        facts = run.prefix.facts()
        assert facts["failures"] == 1 == facts["disk"]["failed_missing"] and facts["restored_tokens"]["dram"] == 96


def test_the_rate_of_what_lies_there_is_measured_without_writing(tmp_path: Path) -> None:
    assert measure_reading(tmp_path) == math.inf
    with open_writer(tmp_path) as writer:
        put(writer, *range(10))
    before = contents(tmp_path)
    assert 0 < measure_reading(tmp_path) < math.inf and contents(tmp_path) == before
