"""A rank's share of a machine, as a machine of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile


def share_of_rank(hardware: HardwareProfile, count: int, rank: int, share: Fraction | None = None) -> HardwareProfile:
    """What ``rank`` of ``count`` may count on while all others work, too: the whole of its card, ``share`` of its host's DRAM and drive,
    and of the cores an equal part, as ranks_of_a_host = count / hosts have it. None: an equal part of all. The memory bus slows all links
    down alike, so it is divided as their rates are. Beside cards that compute in turns the CPU multiplies for one rank at a time: each has
    all of its threads.

    A card's link is slower where those of its host carry at once:

        rate = rate alone * min(1, together / sum of all rates alone)

    Of one rank it is the machine itself, with its first card.
    """
    whole, count, number = f"rank {rank} of {count}", count // hardware.hosts, rank % (count // hardware.hosts)
    devices = hardware.devices[number : number + 1]
    if count == hardware.hosts == 1:
        return hardware if hardware.devices == devices else replace(hardware, devices=devices, others=())
    card = None if hardware.gpu is None else hardware.card(number)
    carried = 1.0 if card is None else hardware.links.share(count, hardware.links_gbps(count))
    ranks, n = 1 / (share or Fraction(1, count)), float(1 / (share or Fraction(1, count)))
    links = hardware.links_gbps(count) / card.gpu.h2d.peak if hardware.others and card is not None else count
    round_cards = [hardware.card(other % count).gpu for other in range(count * hardware.hosts)] if hardware.others else []
    return replace(
        hardware,
        name=f"{hardware.name}, {whole}",
        vram_bytes=hardware.vram_bytes if card is None else card.vram_bytes,
        dram_bytes=hardware.dram_bytes // ranks,
        ssd_bytes=hardware.ssd_bytes // ranks,
        ssd_read=tuple(replace(point, gbps=point.gbps / n) for point in hardware.ssd_read),
        ssd_write_gbps=hardware.ssd_write_gbps / n,
        ssd_long_gbps=hardware.ssd_long_gbps / n,
        dram_copy_gbps=hardware.dram_copy_gbps / n,
        dram_bus_gbps=hardware.dram_bus_gbps / links,
        cpu_cores=max(1, hardware.cpu_cores // count),
        cpu_threads=max(1, (hardware.cpu_threads or hardware.cpu_cores) // count),
        cpu_matvec_gbps=hardware.cpu_matvec_gbps / count,
        cpu_dense_tflops=hardware.cpu_dense_tflops / count,
        cpu_attention_gbps=hardware.cpu_attention_gbps / count,
        cpu_attention_tflops=hardware.cpu_attention_tflops / count,
        cpu_decode=_each(hardware.cpu_decode, count),
        cpu_products=_each(hardware.cpu_products, count),
        gpu=None if card is None else _beside_others(card.gpu, carried),
        links=replace(hardware.links, held_to=carried),
        devices=devices,
        others=(),
        round_cards=tuple(round_cards),
        divided_by=ranks,
    )


def _beside_others(gpu: Gpu, share: float) -> Gpu:
    """``gpu`` with a link at ``share`` of its rate, both ways."""
    up, down = (Curve(tuple((size, rate * share) for size, rate in curve.points)) for curve in (gpu.h2d, gpu.d2h))
    both, pageable = gpu.h2d_with_d2h_gbps * share, gpu.h2d_pageable_gbps * share
    return replace(gpu, h2d=up, d2h=down, h2d_with_d2h_gbps=both, h2d_pageable_gbps=pageable)


def _each(rates: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: rate / count for name, rate in rates.items()}
