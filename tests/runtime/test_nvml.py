"""What the GPU says of itself is sampled beside a run, and its silence never ends one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.planner.common.interrupt import Terminated, terminate_as_interrupt
from penstock.runtime.memory.gpu_sampler import FIGURES, GpuSampler

CUDA = torch.device("cuda", 0)


class Silence(Exception):
    """NVML's error."""


def card(power: Callable[[Any], int] = lambda handle: 300_000, init: Callable[[], None] = lambda: None, **changes: Any) -> SimpleNamespace:
    """A driver with one busy GPU."""
    uses = iter([20, 80] + [50] * 10_000)
    calls = {
        "NVMLError": Silence,
        "NVML_CLOCK_SM": 1,
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-1": "card"}[uuid],
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=next(uses)),
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1980,
        "nvmlDeviceGetPowerUsage": power,
    }
    return SimpleNamespace(**calls | changes)


def sampled(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, passes: int = 3) -> GpuSampler:
    """A sampler that has sampled ``passes`` times at least."""
    monkeypatch.setattr("penstock.runtime.memory.gpu_sampler.PERIOD_S", 0.001)
    with GpuSampler(CUDA, nvml, uuid="1") as sampler:
        deadline = time.monotonic() + 20
        while len(sampler.samples) < passes * len(FIGURES) and sampler.why_absent is None and time.monotonic() < deadline:
            time.sleep(0.001)
    return sampler


def test_means_and_maxima_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    report = sampled(card(), monkeypatch).report()
    assert set(report) == {"busy_share", "sm_clock_mhz", "power_w"}
    assert report["busy_share"]["max"] == 0.8 and 0.2 < report["busy_share"]["mean"] < 0.8
    assert (report["sm_clock_mhz"]["mean"], report["power_w"]["max"]) == (1980, 300)
    assert all(figure["samples"] >= 3 for figure in report.values())


def test_the_thread_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    sampled(card(), monkeypatch)
    assert set(threading.enumerate()) <= before


def test_a_signal_while_the_thread_starts_leaves_neither_thread_nor_driver_open(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)

    monkeypatch.setattr("penstock.runtime.memory.gpu_sampler.PERIOD_S", 0.001)
    before = set(threading.enumerate())
    nvml = card(init=lambda: calls.append("init"), nvmlShutdown=lambda: calls.append("shutdown"))
    with pytest.raises(Terminated), terminate_as_interrupt():
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with GpuSampler(CUDA, nvml, uuid="1"):
            pytest.fail("the signal was not heard")
    assert set(threading.enumerate()) <= before and calls == ["init", "shutdown"]


def test_a_figure_that_a_card_does_not_know_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(handle: Any) -> int:
        raise Silence("Not Supported")

    report = sampled(card(power=unknown), monkeypatch).report()
    assert "power_w" not in report and report["why_absent"] == "power_w: Not Supported"


def test_a_driver_that_cannot_be_asked_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise Silence("Driver Not Loaded")

    assert sampled(card(init=refuse), monkeypatch).report() == {"why_absent": "NVML: Driver Not Loaded"}


def test_without_a_gpu_it_says_so() -> None:
    with GpuSampler(torch.device("cpu")) as sampler:
        pass
    assert sampler.report() == {"why_absent": "no GPU took part"}
