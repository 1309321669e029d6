"""The whole probe in small: seconds of budget in tenths, files of megabytes."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import threading
import time
import types

import pytest
from omegaconf import OmegaConf

from penstock.planner.asked.verb_schema import ProbeConfig, ProbeSettings
from penstock.planner.common.errors import UserError
from penstock.planner.common.origins import unmeasured
from penstock.planner.common.outside.machine_load import Load, Ticks, Watch
from penstock.planner.contract.config.better_profile import read_earlier
from penstock.planner.contract.config.config_schema import HardwareConfig
from penstock.planner.probe import cpu_rates, layer_launch, measure, runtime_rates
from penstock.planner.probe import scratch_file as scratch
from penstock.planner.probe import ssd_rates as ssd
from penstock.planner.probe.bus_rate import Reading, measure_bus, thread_counts
from penstock.planner.probe.dram_rates import Arena, Lock
from penstock.planner.probe.findings import CannotMeasure, Figure, Findings
from penstock.planner.probe.measure import probe
from penstock.planner.probe.watched.clocked import QUICK, Meter
from penstock.planner.verbs import probe_verb as probe_verb_module
from penstock.planner.verbs.probe_verb import probe_verb
from tests.cli import HANGS_S

MIB = 2**20
TINY = dataclasses.replace(
    QUICK,
    total_s=0.2,
    dram_s=0.01,
    cpu_s=0.02,
    gpu_s=0.01,
    write_s=1.0,
    read_least_s=0.1,
    sample_s=0.01,
    arena_bytes=128 * MIB,
    scratch_bytes=8 * MIB,
    ssd_blocks=(MIB // 4, MIB),
    ssd_depths=(1, 2),
    decode_s=0.0,
)
"""Without decoders, which a process of its own measures: its start takes longer than all the rest."""


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path / "config"))
    for module in (scratch, ssd):
        monkeypatch.setattr(module, "LEAST_BYTES", MIB)
    monkeypatch.setattr(ssd, "WRITE_BYTES", MIB)
    monkeypatch.setattr(measure, "QUICK", TINY)
    monkeypatch.setattr(measure, "uncached_bytes", lambda: 0)
    for name in ("WARM_UP_S", "LEAST_S"):
        monkeypatch.setattr(layer_launch, name, 0.01)
    yield
    gc.collect()
    gc.freeze()  # what lives now is not searched again behind the next test


@pytest.fixture
def disk(tmp_path):
    directory = tmp_path / "a disk=x"
    directory.mkdir()
    return directory


def measured(disk) -> HardwareConfig:
    return probe(ProbeSettings(path=str(disk), quick=True)).profile


def test_what_is_read_is_more_than_a_cache_holds(disk, monkeypatch):
    """Beside 300 MiB of cache 0.7 GB were read at 274 GB/s, and 6.3 GB at 149."""
    monkeypatch.setattr(measure, "uncached_bytes", lambda: 256 * MIB)
    origin = measured(disk).origin
    assert "memchr over 268 MB" in origin["dram.bus_gbps"] and " 2 rotated" in origin["cpu.matvec_gbps"]


def test_every_figure_has_an_origin_and_the_profile_fits_the_schema(disk, monkeypatch):
    monkeypatch.setattr(measure, "QUICK", dataclasses.replace(TINY, decode_s=QUICK.decode_s))
    monkeypatch.setattr(runtime_rates, "DECODERS_PATIENCE_S", HANGS_S)
    found = measured(disk)
    assert found.cpu.decode and found.origin["cpu.decode"].startswith("measured 2")
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(HardwareConfig), OmegaConf.structured(found))) == found
    assert {(block, depth) for block, depth, _ in found.ssd.read} <= {(b, d) for b in TINY.ssd_blocks for d in TINY.ssd_depths}
    for path in (
        "dram_bytes",
        "ssd_bytes",
        "ssd.read",
        "ssd.write_gbps",
        "dram.copy_gbps",
        "dram.bus_gbps",
        "dram.pin_s_per_gb",
        "cpu.cores",
        "cpu.threads",
        "cpu.matvec_gbps",
        "cpu.dense_tflops",
        "layer_launch_s",
    ):
        value = OmegaConf.select(OmegaConf.structured(found), path)
        assert value and found.origin[path].startswith("measured 2"), path
    assert list(disk.iterdir()) == []


def test_without_a_gpu_the_profile_computes_on_the_cpu_and_says_why(disk):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = measured(disk)
    assert found.gpu is None and found.vram_bytes == 0
    assert "no CUDA GPU" in unmeasured(found.origin)["gpu"]


@pytest.mark.parametrize("number", [7, -1])
def test_a_card_that_was_asked_for_and_is_not_there_is_refused_before_anything_is_measured(disk, monkeypatch, number):
    monkeypatch.setattr(measure, "_measure_dram", lambda *_: pytest.fail("DRAM is measured"))
    with pytest.raises(UserError, match=f"^probe.gpu={number}: (no CUDA GPU|CUDA shows).*; choose another, or leave it out"):
        probe(ProbeSettings(path=str(disk), gpu=number), TINY)


def test_no_room_for_a_scratch_file_is_said_and_the_rest_is_measured(disk, monkeypatch):
    monkeypatch.setattr(scratch, "free_bytes", lambda _: 1000)
    found = measured(disk)
    assert found.ssd.read == [] and found.ssd.write_gbps == 0.0
    assert "no room" in unmeasured(found.origin)["ssd.write_gbps"]
    assert "no room" in unmeasured(found.origin)["ssd.read"]
    assert found.cpu.matvec_gbps > 0


def test_no_room_but_a_checkpoint_there_measures_reads_on_the_checkpoint(disk, monkeypatch):
    (disk / "model.safetensors").write_bytes(os.urandom(4 * MIB))
    os.sync()
    monkeypatch.setattr(scratch, "free_bytes", lambda _: 1000)
    found = measured(disk)
    assert found.ssd.read and "1 files that were there" in found.origin["ssd.read"] and "no room" in found.origin["ssd.read"]
    assert "ssd.write_gbps" in unmeasured(found.origin)


def test_the_ssd_offers_what_is_free_and_not_what_a_checkpoint_takes(disk, monkeypatch):
    (disk / "model.safetensors").write_bytes(bytes(4 * MIB))
    monkeypatch.setattr(measure, "free_bytes", lambda _: 10**9)
    assert measured(disk).ssd_bytes == 10**9


def test_a_failing_measurement_costs_its_own_figures_only(disk, monkeypatch):
    def failing(*_):
        raise RuntimeError("no such instruction\nwith a traceback below")
        yield

    monkeypatch.setattr(measure, "measure_cpu", failing)
    found = measured(disk)
    assert unmeasured(found.origin)["cpu.matvec_gbps"] == "RuntimeError: no such instruction"
    assert found.cpu.matvec_gbps == 0.0 and found.ssd.read and found.dram.copy_gbps > 0


def copies(gbps: float):
    """Copies that take ``gbps`` of the bus for as long as they are told; the device itself does nothing."""

    def feeding(seconds, going):
        start = end = time.perf_counter()
        while end < start + seconds and going():
            time.sleep(0.001)
            end = time.perf_counter()
        return gbps, start, end

    return feeding


@pytest.fixture
def arena():
    made = Arena(64 * MIB, 4)
    made.fault_in()
    yield made
    made.close(Lock("", lambda *_: None, lambda *_: None))


def test_the_bus_carries_reads_and_copies_together(arena):
    (alone,), (beside,) = (list(measure_bus(arena, 0.1, with_copies)) for with_copies in (None, copies(1e6)))
    assert alone.path == "dram.bus_gbps" and 0 < alone.value < 1e4 and "by 4, 2, 1 threads" in alone.how
    assert beside.value > 1e6 and "1000000.0 of it copies" in beside.how


def test_all_cores_and_halves_of_them_are_tried():
    assert thread_counts(64) == [64, 32, 16, 8] and thread_counts(2) == [2, 1] and thread_counts(1) == [1]


def test_what_is_read_in_a_window_counts_there_alone(arena):
    reading = Reading(arena, 1)
    reading._done = [(1.0, 10**9), (2.0, 10**9), (2.5, 10**9), (9.0, 10**9)]
    assert reading.gbps_within(1.0, 5.0) == pytest.approx(2 / 4)


def test_a_reading_thread_that_fails_ends_the_measurement(arena, monkeypatch):
    def failing(*_):
        raise OSError("a bad page")

    monkeypatch.setattr(arena, "read", failing)
    with pytest.raises(OSError, match="a bad page"):
        list(measure_bus(arena, 0.1, copies(1.0)))


def test_products_are_timed_with_the_threads_that_multiply_fastest_and_torchs_own_come_back(disk, monkeypatch):
    import torch

    before = torch.get_num_threads()
    took = {4: 0.4, 2: 0.1, 1: 0.2}
    monkeypatch.setattr(cpu_rates, "thread_counts", lambda _: list(took))
    monkeypatch.setattr(cpu_rates, "median_seconds", lambda work, seconds, least=3: took[torch.get_num_threads()])
    found = measured(disk)
    assert found.cpu.threads == 2 and "of 4, 2, 1" in found.origin["cpu.threads"] and "2 threads" in found.origin["cpu.dense_tflops"]
    assert torch.get_num_threads() == before


def test_a_scratch_file_in_memory_leaves_most_of_the_memory_alone(disk, monkeypatch):
    sizes = []

    def filled(fd, direct, size, *rest):
        sizes.append(size)
        return ssd.fill_scratch(fd, direct, min(size, 8 * MIB), *rest)

    monkeypatch.setattr(measure, "fill_scratch", filled)
    monkeypatch.setattr(measure, "QUICK", dataclasses.replace(TINY, scratch_bytes=10**15))
    monkeypatch.setattr(scratch, "free_bytes", lambda _: 10**18)
    monkeypatch.setattr(measure, "file_system", lambda _: "tmpfs")
    found = measured(disk)
    assert sizes[0] <= found.dram_bytes // 4 and "memory, not an SSD" in found.origin["ssd_bytes"]


@pytest.mark.parametrize("direct", [True, False])
def test_a_scratch_file_that_is_written_through_the_page_cache_is_smaller(disk, monkeypatch, direct):
    sizes = []

    def filled(fd, _, size, *rest):
        sizes.append(size)
        raise CannotMeasure("enough")

    monkeypatch.setattr(scratch, "_direct_writes", lambda _: direct)
    monkeypatch.setattr(scratch, "set_direct", lambda _: True)
    monkeypatch.setattr(measure, "fill_scratch", filled)
    monkeypatch.setattr(measure, "file_system", lambda _: "ext4")
    monkeypatch.setattr(measure, "QUICK", dataclasses.replace(TINY, scratch_bytes=8 * MIB, buffered_bytes=4 * MIB))
    measured(disk)
    assert sizes == [8 * MIB if direct else 4 * MIB]


@pytest.mark.parametrize("where", ["fill_scratch", "sweep", "measure_cpu"])
def test_an_interrupt_leaves_no_file_no_profile_and_no_thread(disk, tmp_path, monkeypatch, where):
    def interrupted(*_):
        raise KeyboardInterrupt

    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(measure, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        probe_verb(ProbeConfig(ProbeSettings(path=str(disk), quick=True)))
    assert list(disk.iterdir()) == []
    assert list((tmp_path / "config" / "hardware").iterdir()) == []
    assert {thread for thread in threading.enumerate() if not thread.daemon} <= threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_sigterm_in_the_middle_of_reading_ends_like_an_interrupt(disk, monkeypatch):
    real = os.preadv
    reads = iter(range(10**9))

    def terminating(*arguments):
        if next(reads) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "preadv", terminating)
    with pytest.raises(KeyboardInterrupt):
        measured(disk)
    assert list(disk.iterdir()) == [] and signal.getsignal(signal.SIGTERM) == before


def test_a_path_that_is_no_directory_is_refused_in_one_line(disk):
    with pytest.raises(UserError, match="probe.path=.*nowhere is not a directory"):
        measured(disk / "nowhere")


def test_off_a_terminal_the_bar_says_nothing(capsys):
    with Meter(5) as meter:
        meter.say("memory")
        meter.tick()
    assert capsys.readouterr() == ("", "")


def test_the_verb_writes_the_profile_and_ends_with_one_json_line(disk, tmp_path, capsys):
    probe_verb(ProbeConfig(ProbeSettings(path=str(disk), quick=True, name="mine")))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["profile"] == str(tmp_path / "config" / "hardware" / "mine.yaml")
    assert OmegaConf.load(last["profile"]).name == "mine" and last["origin"]["dram_bytes"].startswith("measured 2")


def probed_as(config: HardwareConfig, busy: bool = False):
    return lambda _: measure.Probed(config, Load(2, 1.9 if busy else 0.0, 0.0, (4.2, 4.0)))


def test_a_better_profile_is_kept_until_it_is_forced_and_the_worst_figure_is_named(disk, tmp_path, capsys, monkeypatch):
    good = measured(disk)
    slow = dataclasses.replace(good, dram=dataclasses.replace(good.dram, copy_gbps=good.dram.copy_gbps / 4))
    slow = dataclasses.replace(slow, layer_launch_s=2 * good.layer_launch_s)
    path = tmp_path / "config" / "hardware" / "mine.yaml"

    def run(config: HardwareConfig, busy: bool = False, **keys) -> None:
        monkeypatch.setattr(probe_verb_module, "probe", probed_as(config, busy))
        probe_verb(ProbeConfig(ProbeSettings(path=str(disk), name="mine", **keys)))

    run(good)
    before = path.read_text()
    with pytest.raises(
        UserError,
        match=r"is kept, which has better figures: dram.copy_gbps is .*, and 1 more is worse \(the machine is busy\); .*probe.force=true",
    ):
        run(slow, busy=True)
    assert path.read_text() == before
    said = " ".join(capsys.readouterr().out.split())
    assert "the machine is busy: others used 1.9 of 2 cores before and 0.0 meanwhile, load average 4.2 before, 4.0 after" in said
    run(slow, force=True)
    assert path.read_text() != before
    run(good)
    assert path.read_text() == before, "a better one needs no force"


def test_what_cannot_be_read_as_an_earlier_profile_is_no_reason_to_refuse(tmp_path):
    for text in ("a: [", "name: 3\nwhat: is this", "- 1"):
        (tmp_path / "p.yaml").write_text(text)
        assert read_earlier(tmp_path / "p.yaml") is None
    assert read_earlier(tmp_path / "none.yaml") is None


def test_figures_are_marked_busy_where_others_took_the_processor(disk, monkeypatch):
    monkeypatch.setattr(measure, "Watch", lambda: types.SimpleNamespace(load=lambda cores: Load(2, 0.0, 1.5, (0.1, 3.0))))
    origin = measured(disk).origin
    assert origin["dram.copy_gbps"].endswith(", busy") and origin["cpu.matvec_gbps"].endswith(", busy")
    assert not origin["dram_bytes"].endswith("busy") and not any(text.endswith("busy") for text in unmeasured(origin).values())


def test_load_is_what_others_took_of_the_processor_before_and_meanwhile():
    ticks = iter([Ticks(0.0, 100.0, 1.0), Ticks(0.5, 100.75, 1.0), Ticks(10.5, 125.75, 21.0)])
    watch = Watch(lambda: next(ticks), lambda _: None)
    load = watch.load(2)
    assert (load.before_cores, load.meanwhile_cores) == (1.5, 0.5) and load.busy
    assert not Load(2, 0.4, 0.9, (0.0, 1.0)).busy and Load(2, 0.0, 1.1, (0.0, 1.0)).busy
    assert Watch(lambda: None, lambda _: None).load(2).before_cores == 0.0
    real = Ticks.now()
    assert real is None or real.everyone_s >= 0


def test_a_drive_that_slows_down_has_a_long_rate_and_a_burst():
    rates = iter([2.3, 2.2, 2.25, 2.2, 1.9, 1.95, 1.9, 1.94])
    found = ssd.read_long(lambda _: next(rates), 8 * ssd.SLICE_S, lambda: None)
    assert found.gbps == pytest.approx(1.92) and found.burst_s(2.27) == 4 * ssd.SLICE_S
    steady = ssd.LongRead((2.2, 2.3, 2.25, 2.2))
    assert steady.gbps > ssd.STEADY * 2.27 and steady.burst_s(2.27) == 4 * ssd.SLICE_S


def test_a_long_read_is_kept_beside_the_burst_where_it_is_slower(disk, monkeypatch):
    monkeypatch.setattr(measure, "QUICK", dataclasses.replace(TINY, long_s=2.0))
    monkeypatch.setattr(measure, "file_system", lambda _: "ext4")
    monkeypatch.setattr(measure, "read_long", lambda read, seconds, tick: ssd.LongRead((100.0, 1e-6, 1e-6)))
    monkeypatch.setattr(scratch.Target, "repeats", True)
    config = measured(disk)
    assert config.ssd.long_gbps == 1e-6 and config.ssd.burst_s == ssd.SLICE_S
    assert max(rate for *_, rate in config.ssd.read) > 1e-6 and "without a pause" in config.origin["ssd.long_gbps"]


def test_samples_that_differ_are_named():
    assert measure._steadiness([2.0] * 9 + [1.0]) == "" and measure._steadiness([2.0, 1.9, 2.1]) == ""
    assert measure._steadiness([1.0, 2.0, 2.1]) == "unsteady: 1 to 2.1 GB/s"


def test_page_locking_that_is_refused_counts_the_fault_in_alone_and_says_so():
    arena = Arena(64 * MIB, 2)
    refused = Lock("mlock", lambda *_: "Operation not permitted", lambda *_: pytest.fail("nothing to unlock"))
    (figure,) = arena.pinning(refused)
    arena.close(refused)
    assert figure.value > 0 and "fault-in alone: mlock refused (Operation not permitted)" in figure.how


def test_locked_memory_is_unlocked_when_the_arena_closes():
    unlocked = []
    lock = Lock("mlock", lambda *_: None, lambda address, nbytes: unlocked.append(nbytes))
    arena = Arena(64 * MIB, 2)
    list(arena.pinning(lock))
    arena.close(lock)
    assert unlocked == [64 * MIB]


def test_the_shares_of_an_arena_cover_every_byte_once():
    arena = Arena(70 * MIB, 3)
    shares: list[tuple[int, int]] = []
    arena.each(lambda offset, length: shares.append((offset, length)))
    arena.close(Lock("", lambda *_: None, lambda *_: None))
    shares.sort()
    assert shares[0][0] == 0 and sum(length for _, length in shares) == 70 * MIB
    assert all(a + n == b for (a, n), (b, _) in zip(shares, shares[1:], strict=False))


def test_too_little_memory_to_measure_on_is_a_reason():
    with pytest.raises(CannotMeasure, match="too little"):
        Arena(MIB, 2)


def test_figures_found_before_a_failure_are_kept():
    found = Findings("2026-11-21")

    def partly():
        yield Figure("a", 1.0, "how")
        raise OSError("gone")

    assert not found.attempt(("a", "b"), partly)
    assert found.number("a") == 1.0 and found.origin["a"] == "measured 2026-11-21: how"
    assert unmeasured(found.origin) == {"b": "OSError: gone"}
