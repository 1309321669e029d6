"""Whether a profile that is there already was measured on a better day: rates compared one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from penstock.planner.contract.config.config_schema import GpuConfig, HardwareConfig

WORSE = 0.8
"""Share of an earlier rate below which the new one is worse: between two good days rates differ by less."""


@dataclass(frozen=True)
class Worse:
    """A figure that is worse than it was. ``share`` is the new rate over the earlier one."""

    path: str
    new: float
    earlier: float
    share: float

    def __str__(self) -> str:
        return f"{self.path} is {self.new:.3g}, earlier {self.earlier:.3g}"


def read_earlier(path: Path) -> HardwareConfig | None:
    """The profile of an earlier probe; None where there is none that can be read."""
    try:
        found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(HardwareConfig), OmegaConf.load(path)))
    except (OSError, YAMLError, UnicodeDecodeError, OmegaConfBaseException):
        return None
    return found if isinstance(found, HardwareConfig) else None


def worse_than(earlier: HardwareConfig, new: HardwareConfig) -> list[Worse]:
    """Figures of ``new`` that are worse than in ``earlier``, the worst first; of those that both have."""
    before = dict(_rates(earlier))
    found = [
        Worse(path, value, before[path], share)
        for path, value in _rates(new)
        if path in before and value > 0 < before[path]
        and (share := before[path] / value if path.endswith(_SECONDS) else value / before[path]) < WORSE
    ]  # fmt: skip
    return sorted(found, key=lambda worse: worse.share)


_SECONDS = (".pin_s_per_gb", "layer_launch_s", ".copy_s", ".prompt_piece_s")
"""Figures of which less is better."""


def _rates(config: HardwareConfig) -> Iterator[tuple[str, float]]:
    yield "ssd.read", max((float(rate) for *_, rate in config.ssd.read), default=0.0)
    yield "ssd.write_gbps", config.ssd.write_gbps
    yield "dram.copy_gbps", config.dram.copy_gbps
    yield "dram.bus_gbps", config.dram.bus_gbps
    yield "dram.pin_s_per_gb", config.dram.pin_s_per_gb
    yield "cpu.matvec_gbps", config.cpu.matvec_gbps
    yield "cpu.dense_tflops", config.cpu.dense_tflops
    yield "cpu.attention_gbps", config.cpu.attention_gbps
    yield "cpu.attention_tflops", config.cpu.attention_tflops
    yield "layer_launch_s", config.layer_launch_s
    if config.gpu is not None:
        yield from _of_card("gpu", config.gpu)
    for other in config.others:
        yield from _of_card(f"others.{other.device} {other.gpu.name}", other.gpu)


def _of_card(of: str, gpu: GpuConfig) -> Iterator[tuple[str, float]]:
    yield f"{of}.h2d", max((float(rate) for _, rate in gpu.h2d), default=0.0)
    yield f"{of}.d2h", max((float(rate) for _, rate in gpu.d2h), default=0.0)
    for name in ("memory_gbps", "dense_tflops", "attention_tflops", "burst_tflops", "copy_s", "prompt_piece_s"):
        yield f"{of}.{name}", getattr(gpu, name)
