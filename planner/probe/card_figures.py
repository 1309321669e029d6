"""All that is measured of one card, and what a profile says of it."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.planner.contract.config.config_schema import GpuConfig
from penstock.planner.probe.dram_rates import Arena
from penstock.planner.probe.findings import CannotMeasure, Findings
from penstock.planner.probe.gpu_rates import Gpu

NO_ARENA = CannotMeasure("no DRAM mapping to measure on")
NEEDED = ("gpu.dense_tflops", "gpu.attention_tflops", "gpu.memory_gbps", "gpu.h2d", "gpu.d2h")
"""Without these no plan uses a card."""
_LINK = ("gpu.h2d", "gpu.d2h")


def measure_card(found: Findings, gpu: Gpu, arena: Arena | None, seconds: float) -> None:
    """``gpu``'s rates and its link's, each figure within about ``seconds``. It must be the card in use."""
    found.attempt(("gpu.dense_tflops", "gpu.attention_tflops", "gpu.memory_gbps"), lambda: gpu.compute(seconds))
    found.attempt(("gpu.h2d_pageable_gbps",), lambda: gpu.pageable(seconds))
    if arena is None:
        found.lack((*_LINK, "gpu.h2d_with_d2h_gbps", "gpu.copy_s"), str(NO_ARENA))
        return
    found.attempt(_LINK, lambda: gpu.link(arena, seconds))
    found.attempt(("gpu.h2d_with_d2h_gbps",), lambda: gpu.both_ways(arena, seconds))
    found.attempt(("gpu.copy_s",), lambda: gpu.issuing(arena, seconds))
    found.attempt(("gpu.name",), gpu.identity)


def peak_gbps(found: Findings) -> float:
    """Of the card's link; 0 where it was not measured."""
    return max((rate for _, rate in found.rows("gpu.h2d")), default=0.0)


def card_config(gpu: Gpu, found: Findings) -> GpuConfig:
    """What was ``found`` of ``gpu``."""
    number, rows = found.number, found.rows
    return GpuConfig(
        name=gpu.name,
        context_bytes=gpu.context_bytes,
        dense_tflops=number("gpu.dense_tflops"),
        attention_tflops=number("gpu.attention_tflops"),
        burst_tflops=number("gpu.burst_tflops"),
        burst_s=number("gpu.burst_s"),
        memory_gbps=number("gpu.memory_gbps"),
        h2d=rows("gpu.h2d"),
        d2h=rows("gpu.d2h"),
        h2d_pageable_gbps=number("gpu.h2d_pageable_gbps"),
        h2d_with_d2h_gbps=number("gpu.h2d_with_d2h_gbps"),
        copy_s=number("gpu.copy_s") or GpuConfig.copy_s,
        prompt_piece_s=number("gpu.prompt_piece_s"),
        layer_kernels_s=GpuConfig.layer_kernels_s if find_spec("triton") else 0.0,
        decode=found.by_name("gpu.decode"),
        products=found.by_name("gpu.products"),
    )
