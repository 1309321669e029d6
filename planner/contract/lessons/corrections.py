"""The one place where a machine's figures are corrected: a profile with stages made slower or faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile

_PATHS = {
    Figure.ssd: ("ssd.read", "ssd.write_gbps"),
    Figure.h2d: ("gpu.h2d", "gpu.h2d_with_d2h_gbps"),
    Figure.d2h: ("gpu.d2h",),
    Figure.dram_copy: ("dram.copy_gbps",),
    Figure.page_lock: ("dram.pin_s_per_gb",),
}
_COMPUTE: Mapping[Figure, Mapping[bool, tuple[str, ...]]] = {
    Figure.weights: {True: ("gpu.memory_gbps", "layer_launch_s"), False: ("cpu.matvec_gbps", "layer_launch_s")},
    Figure.products: {True: ("gpu.dense_tflops", "gpu.attention_tflops"), False: ("cpu.dense_tflops",)},
}


def paths(figure: Figure, gpu: bool) -> tuple[str, ...]:
    """Dotted names in the profile of what ``figure`` covers."""
    return _COMPUTE[figure][gpu] if figure in _COMPUTE else _PATHS[figure]


def slowed(hardware: HardwareProfile, by: Mapping[Figure, float]) -> HardwareProfile:
    """``hardware`` with each figure's seconds multiplied: 2 is half as fast, 1 (what is not named) as before.

    Ratios within a figure stay. The host's memory bus carries at least what each link is then said to move alone.
    """
    k = {figure: by.get(figure, 1.0) for figure in Figure}
    gpu = hardware.gpu
    host = dict.fromkeys(Figure, 1.0) if gpu else k
    faster = replace(
        hardware,
        ssd_read=tuple(replace(point, gbps=point.gbps / k[Figure.ssd]) for point in hardware.ssd_read),
        ssd_write_gbps=hardware.ssd_write_gbps / k[Figure.ssd],
        ssd_long_gbps=hardware.ssd_long_gbps / k[Figure.ssd],
        dram_copy_gbps=hardware.dram_copy_gbps / k[Figure.dram_copy],
        pin_s_per_gb=hardware.pin_s_per_gb * k[Figure.page_lock],
        cpu_matvec_gbps=hardware.cpu_matvec_gbps / host[Figure.weights],
        cpu_dense_tflops=hardware.cpu_dense_tflops / host[Figure.products],
        cpu_attention_gbps=hardware.cpu_attention_gbps / host[Figure.weights],
        cpu_attention_tflops=hardware.cpu_attention_tflops / host[Figure.products],
        cpu_decode=_slowed_rates(hardware.cpu_decode, host[Figure.weights]),
        cpu_products=_slowed_rates(hardware.cpu_products, host[Figure.weights]),
        layer_launch_s=hardware.layer_launch_s * k[Figure.weights],
        gpu=gpu and _slowed_gpu(gpu, k),
        round_cards=tuple(_slowed_gpu(card, k) for card in hardware.round_cards),
    )
    alone = faster.gpu.h2d.peak if faster.gpu else faster.cpu_matvec_gbps
    return replace(faster, dram_bus_gbps=hardware.dram_bus_gbps and max(hardware.dram_bus_gbps, faster.ssd_peak_gbps, alone))


def _slowed_gpu(gpu: Gpu, k: Mapping[Figure, float]) -> Gpu:
    return replace(
        gpu,
        dense_tflops=gpu.dense_tflops / k[Figure.products],
        attention_tflops=gpu.attention_tflops / k[Figure.products],
        burst_tflops=gpu.burst_tflops / k[Figure.products],
        memory_gbps=gpu.memory_gbps / k[Figure.weights],
        decode=_slowed_rates(gpu.decode, k[Figure.weights]),
        products=_slowed_rates(gpu.products, k[Figure.weights]),
        h2d=_slowed_curve(gpu.h2d, k[Figure.h2d]),
        d2h=_slowed_curve(gpu.d2h, k[Figure.d2h]),
        h2d_with_d2h_gbps=gpu.h2d_with_d2h_gbps / k[Figure.h2d],
    )


def _slowed_rates(rates: Mapping[str, float], k: float) -> dict[str, float]:
    return {name: rate / k for name, rate in rates.items()}


def _slowed_curve(curve: Curve, k: float) -> Curve:
    return Curve(tuple((nbytes, gbps / k) for nbytes, gbps in curve.points))
