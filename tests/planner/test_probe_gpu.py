"""The GPU's part of the probe: what can be shown without a GPU, with the CPU standing in for the device."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import types

import pytest
import torch

from penstock.planner.probe import gpu_rates as module
from penstock.planner.probe import layer_launch as layer
from penstock.planner.probe.dram_rates import Arena, Lock
from penstock.planner.probe.driver import NvmlGpu, nvml_gpus
from penstock.planner.probe.findings import CannotMeasure
from penstock.planner.probe.gpu_rates import Gpu, burst_of
from penstock.planner.probe.layer_launch import TinyDecoder, measure_launch

MIB = 2**20
NO_LOCK = Lock("none", lambda *_: None, lambda *_: None)


def timed(issue, stream=None) -> float:
    start = time.perf_counter()
    issue()
    return time.perf_counter() - start


@pytest.fixture
def stand_in(monkeypatch) -> Gpu:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(module, "CHUNKS", (MIB // 4, MIB, 4 * MIB))
    monkeypatch.setattr(module, "PASS_BYTES", 8 * MIB)
    gpu = object.__new__(Gpu)
    gpu.device, gpu.index = "cpu", 0
    gpu._seconds = timed
    return gpu


@pytest.fixture
def arena():
    made = Arena(16 * MIB, 2)
    list(made.pinning(NO_LOCK))
    yield made
    made.close(NO_LOCK)


def test_the_link_has_a_row_for_each_chunk_size_in_both_directions(stand_in, arena):
    figures = {figure.path: figure.value for figure in stand_in.link(arena, 0.01)}
    assert set(figures) == {"gpu.h2d", "gpu.d2h"}
    for rows in figures.values():
        assert [size for size, _ in rows] == [MIB // 4, MIB, 4 * MIB] and all(rate > 0 for _, rate in rows)


def test_copies_move_every_byte_of_a_pass(stand_in):
    to, from_ = torch.zeros(8 * MIB, dtype=torch.uint8), torch.ones(8 * MIB, dtype=torch.uint8)
    stand_in._copies(to, from_, MIB)()
    assert int(to.sum(dtype=torch.int64)) == 8 * MIB


def test_memory_that_could_not_be_locked_gives_no_locked_figures(stand_in):
    unlocked = Arena(16 * MIB, 2)
    list(unlocked.pinning(Lock("cudaHostRegister", lambda *_: "CUDA error 2", lambda *_: None)))
    with pytest.raises(CannotMeasure, match="page-locked"):
        list(stand_in.link(unlocked, 0.01))
    unlocked.close(NO_LOCK)


def test_the_pageable_rate_is_measured_on_its_own_memory(stand_in):
    (figure,) = stand_in.pageable(0.01)
    assert figure.path == "gpu.h2d_pageable_gbps" and figure.value > 0


def test_the_hosts_part_of_a_copy_is_timed_beside_kernels_that_are_launched(stand_in, arena, monkeypatch):
    counted = itertools.count()
    event = types.SimpleNamespace(record=lambda stream=None: next(counted), synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    (figure,) = stand_in.issuing(arena, 0.01)
    issued = next(counted)
    assert figure.path == "gpu.copy_s" and 0 < figure.value < 1 and issued >= module.LEAST_COPIES and f"{issued} copies" in figure.how


@pytest.mark.parametrize("whose", ["copier", "retirer"])
def test_a_copy_that_fails_ends_the_timing(stand_in, arena, monkeypatch, whose):
    def fails(**_):
        raise RuntimeError("CUDA error 700")

    broken = types.SimpleNamespace(record=lambda stream: None, synchronize=fails)
    monkeypatch.setattr(torch.cuda, "Event", fails if whose == "copier" else lambda **_: broken)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        list(stand_in.issuing(arena, 10.0))


@pytest.mark.parametrize("reads", [0, 2, 10**9])
def test_copies_go_on_while_there_are_reads_and_no_longer_than_asked(stand_in, arena, monkeypatch, reads):
    monkeypatch.setattr(module, "BUSY_CHUNK", MIB)
    monkeypatch.setattr(torch.cuda, "Event", lambda: types.SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    ticks = itertools.count()
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks) / 1000))
    left = iter(range(reads))
    gbps, start, end = stand_in.feeding(arena, 0.05, lambda: next(left, None) is not None)
    copies = min(reads + 1, 50)
    assert end - start == pytest.approx((copies + 1) / 1000), "the clock is asked before each copy but the first, and at both ends"
    assert gbps == pytest.approx(copies * MIB / 1e9 / (end - start))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_torch_that_sees_no_gpu_is_the_reason():
    with pytest.raises(CannotMeasure, match="no CUDA GPU: torch"):
        Gpu(0)


def test_the_gpu_is_found_in_nvml_by_its_uuid_and_not_by_its_number(stand_in):
    gpus = {f"GPU-{letter}": NvmlGpu(f"GPU-{letter}", letter, 10, used, "PCIe 5 x16") for letter, used in (("a", 1), ("b", 2))}
    stand_in._uuid = "b"
    assert stand_in._pick(gpus).used_bytes == 2
    stand_in._uuid = "c"
    assert stand_in._pick(gpus) is None


def false_nvml(**changed) -> types.ModuleType:
    fake = types.ModuleType("pynvml")
    fake.NVMLError = type("NVMLError", (Exception,), {})
    usual = dict(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetMemoryInfo=lambda h: types.SimpleNamespace(total=80, used=5),
        nvmlDeviceGetUUID=lambda h: b"GPU-a",
        nvmlDeviceGetName=lambda h: "H100",
        nvmlDeviceGetCurrPcieLinkGeneration=lambda h: 4,
        nvmlDeviceGetCurrPcieLinkWidth=lambda h: 16,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda h: 5,
        nvmlDeviceGetMaxPcieLinkWidth=lambda h: 16,
    )
    for name, value in {**usual, **changed}.items():
        setattr(fake, name, value)
    return fake


def test_nvml_gives_identity_and_the_link(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", false_nvml())
    assert nvml_gpus() == {"GPU-a": NvmlGpu("GPU-a", "H100", 80, 5, "PCIe 4 x16 now, PCIe 5 x16 at most")}


def test_a_link_that_nvml_does_not_know_is_a_question_mark(monkeypatch):
    fake = false_nvml()

    def unknown(_):
        raise fake.NVMLError("Not Supported")

    fake.nvmlDeviceGetCurrPcieLinkGeneration = unknown
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert nvml_gpus()["GPU-a"].pcie.startswith("PCIe ? x16 now")


@pytest.mark.parametrize("how", ["absent", "failing"])
def test_nvml_that_is_absent_or_fails_is_a_reason(monkeypatch, how):
    fake = false_nvml()

    def failing():
        raise fake.NVMLError("Driver Not Loaded")

    fake.nvmlInit = failing
    monkeypatch.setitem(sys.modules, "pynvml", None if how == "absent" else fake)
    with pytest.raises(CannotMeasure, match="not installed|Driver Not Loaded"):
        nvml_gpus()


def test_every_step_of_the_small_model_is_over_the_same_cache():
    model = TinyDecoder("cpu")
    with torch.inference_mode():
        first, _ = model.step(), model.timed_step(lambda: None)
        again = model.step()
    assert first.shape == (1, 1, 128) and bool(torch.isfinite(first).all()) and torch.equal(first, again)


def test_launching_counts_the_issuing_and_not_the_waiting(monkeypatch):
    now = [0.0]

    def wait():
        now[0] += 10.0

    monkeypatch.setattr(layer, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    (figure,) = measure_launch("cpu", 1.0, wait)
    assert now[0] >= 30.0 and figure.value == 0.0


def ends(*each_s: tuple[int, float]) -> list[float]:
    """Of so many products of so many seconds each."""
    return list(itertools.accumulate(s for count, s in each_s for _ in range(count)))


def test_a_burst_lasts_until_products_take_their_usual_time() -> None:
    found = burst_of(ends((100, 0.8e-3), (400, 1e-3)), 1e-3)
    assert found is not None and found.each_s == pytest.approx(0.8e-3) and found.seconds == pytest.approx(0.08)
    drifting = burst_of(ends((100, 0.8e-3), (200, 0.999e-3), (200, 1.02e-3)), 1e-3)
    rising = burst_of(ends((1, 4e-3), (100, 0.8e-3), (400, 1e-3)), 1e-3)
    assert rising is not None and rising.seconds == pytest.approx(0.084)
    assert drifting is not None and drifting.each_s == pytest.approx(0.8e-3), "what comes slowly later is no burst"


@pytest.mark.parametrize("each", [[(500, 1e-3)], [(500, 1.1e-3)], [(500, 0.99e-3)], [(3, 5e-3), (497, 1e-3)], [(1, 2e-3)]])
def test_a_card_that_is_as_fast_all_the_time_has_no_burst(each: list[tuple[int, float]]) -> None:
    assert burst_of(ends(*each), 1e-3) is None
