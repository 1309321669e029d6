"""What the GPU says of itself while it works: how busy it is, its clock and its power, sampled beside the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

from penstock.planner.common.interrupt import uninterrupted
from penstock.planner.common.timeline.spans import Sample

PERIOD_S = 0.1
"""Between samples: the driver's own figures change no faster."""


class Figure(NamedTuple):
    """One figure of a card, by its key in the report."""

    key: str
    read: Callable[[ModuleType, Any], float]


FIGURES = (
    Figure("busy_share", lambda nvml, card: nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100),
    Figure("sm_clock_mhz", lambda nvml, card: float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM))),
    Figure("power_w", lambda nvml, card: nvml.nvmlDeviceGetPowerUsage(card) / 1e3),
)
"""``busy_share``: of the driver's last sample period (a sixth of a second to a second), the share with a kernel running."""


class GpuSampler:
    """Samples ``FIGURES`` on a thread of its own between ``with`` and its end; costs the run some 10 driver calls a second.

    Never fails a run: what cannot be read stands in :meth:`report`. ``device`` is a CUDA device, or one without NVML; ``nvml`` is
    the module ``pynvml`` or a test's own, imported when None.
    """

    def __init__(self, device: torch.device, nvml: ModuleType | None = None, uuid: str | None = None):
        self.samples: list[Sample] = []
        self.why_absent: str | None = None
        self._nvml: Any = nvml
        self._device = device
        self._uuid = uuid
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GpuSampler:
        try:
            with uninterrupted():
                card = self._open()
                if card is not None:
                    thread = threading.Thread(target=self._sample, args=(card,), name="penstock-nvml", daemon=True)
                    thread.start()
                    self._thread = thread
        except BaseException:  # a signal, heard only now: without an enter there is no exit
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            self.why_absent = self.why_absent or f"NVML: {error}"

    def report(self) -> dict[str, Any]:
        """Figure -> mean and max, with the number of samples; ``why_absent`` where there is nothing, or no more, to say."""
        out: dict[str, Any] = {}
        for figure in FIGURES:
            values = [s.value for s in self.samples if s.name == figure.key]
            if values:
                out[figure.key] = {"mean": sum(values) / len(values), "max": max(values), "samples": len(values)}
        if out and self.why_absent is None:
            return out
        return out | {"why_absent": self.why_absent or "the run was over before the first sample"}

    def _open(self) -> Any | None:
        """The card's handle, None with the reason kept."""
        if self._device.type != "cuda":
            self.why_absent = "no GPU took part"
            return None
        if self._nvml is None:
            try:
                import pynvml
            except ImportError:
                self.why_absent = "nvidia-ml-py is not installed"
                return None
            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self.why_absent = f"NVML: {error}"
            return None
        try:
            uuid = self._uuid or str(torch.cuda.get_device_properties(self._device).uuid)
            return self._nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        except self._nvml.NVMLError as error:
            self.why_absent = f"NVML: {error}"
            self._nvml.nvmlShutdown()
            return None

    def _sample(self, card: Any) -> None:
        figures = list(FIGURES)
        while figures:
            for figure in tuple(figures):
                try:
                    value = figure.read(self._nvml, card)
                except self._nvml.NVMLError as error:  # some cards, and slices of cards, do not know every figure
                    figures.remove(figure)
                    self.why_absent = f"{figure.key}: {error}"
                    continue
                self.samples.append(Sample(figure.key, time.perf_counter(), value))
            if self._over.wait(PERIOD_S):
                return
