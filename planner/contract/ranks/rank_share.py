"""A rank's share of a machine, as a machine of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile


def share_of_rank(hardware: HardwareProfile, count: int, rank: int) -> HardwareProfile:
    """What ``rank`` of ``count`` may count on while all others work, too: the whole of a card, and of everything else on its host an equal
    part, as ranks_of_a_host = count / hosts have it.

    A card's link is slower where those of its host carry at once:

        rate = rate alone * min(1, together / (ranks_of_a_host * alone))

    Of one rank it is the machine itself, with its first card.
    """
    whole, count, number = f"rank {rank} of {count}", count // hardware.hosts, rank % (count // hardware.hosts)
    devices = hardware.devices[number : number + 1]
    if count == hardware.hosts == 1:
        return hardware if hardware.devices == devices else replace(hardware, devices=devices)
    gpu = hardware.gpu
    carried = 1.0 if gpu is None else hardware.links.share(count, gpu.h2d.peak)
    return replace(
        hardware,
        name=f"{hardware.name}, {whole}",
        dram_bytes=hardware.dram_bytes // count,
        ssd_bytes=hardware.ssd_bytes // count,
        ssd_read=tuple(replace(point, gbps=point.gbps / count) for point in hardware.ssd_read),
        ssd_write_gbps=hardware.ssd_write_gbps / count,
        ssd_long_gbps=hardware.ssd_long_gbps / count,
        dram_copy_gbps=hardware.dram_copy_gbps / count,
        dram_bus_gbps=hardware.dram_bus_gbps / count,
        cpu_cores=max(1, hardware.cpu_cores // count),
        cpu_threads=max(1, (hardware.cpu_threads or hardware.cpu_cores) // count),
        cpu_matvec_gbps=hardware.cpu_matvec_gbps / count,
        cpu_dense_tflops=hardware.cpu_dense_tflops / count,
        cpu_decode=_each(hardware.cpu_decode, count),
        cpu_products=_each(hardware.cpu_products, count),
        gpu=None if gpu is None else _beside_others(gpu, carried),
        links=replace(hardware.links, held_to=carried),
        host=None,
        devices=devices,
    )


def _beside_others(gpu: Gpu, share: float) -> Gpu:
    """``gpu`` with a link at ``share`` of its rate, both ways."""
    up, down = (Curve(tuple((size, rate * share) for size, rate in curve.points)) for curve in (gpu.h2d, gpu.d2h))
    both, pageable = gpu.h2d_with_d2h_gbps * share, gpu.h2d_pageable_gbps * share
    return replace(gpu, h2d=up, d2h=down, h2d_with_d2h_gbps=both, h2d_pageable_gbps=pageable)


def _each(rates: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: rate / count for name, rate in rates.items()}
