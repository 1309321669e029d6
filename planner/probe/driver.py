"""The GPU as NVML knows it: memory in use before this process, and the PCIe link. All of it may be unavailable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.planner.probe.findings import CannotMeasure


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU at one moment. Bytes in use are the whole device's."""

    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    pcie: str
    """``PCIe 5 x16 now, PCIe 5 x16 at most``: an idle link runs slower than it can."""


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, and the newest CUDA (major, minor) that it runs."""

    version: str
    cuda: tuple[int, int]


def _word(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text


def nvml_driver() -> Driver:
    """The driver; raises CannotMeasure when NVML cannot be asked."""
    with _nvml() as pynvml:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return Driver(_word(pynvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10))


def nvml_gpus() -> dict[str, NvmlGpu]:
    """GPUs by UUID, those hidden from CUDA included; raises CannotMeasure when NVML cannot be asked."""
    with _nvml() as pynvml:
        gpus = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            uuid = _word(pynvml.nvmlDeviceGetUUID(handle))
            gpus[uuid] = NvmlGpu(uuid, _word(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used), _pcie(pynvml, handle))
        return gpus


@contextmanager
def _nvml() -> Iterator[Any]:
    """The library, open; raises CannotMeasure for whatever it refuses."""
    try:
        import pynvml
    except ImportError as error:
        raise CannotMeasure("nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise CannotMeasure(f"NVML: {error}") from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise CannotMeasure(f"NVML: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def _pcie(pynvml: Any, handle: Any) -> str:
    def ask(name: str) -> str:
        try:
            return str(getattr(pynvml, name)(handle))
        except pynvml.NVMLError:
            return "?"

    now = f"PCIe {ask('nvmlDeviceGetCurrPcieLinkGeneration')} x{ask('nvmlDeviceGetCurrPcieLinkWidth')}"
    most = f"PCIe {ask('nvmlDeviceGetMaxPcieLinkGeneration')} x{ask('nvmlDeviceGetMaxPcieLinkWidth')}"
    return f"{now} now, {most} at most"
