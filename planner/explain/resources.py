"""What of a machine could be had more of: capacities and rates, each as one figure that can be changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from penstock.planner.common.measures import GB
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile
from penstock.planner.contract.given.model import ModelSpec

SHARES_LEFT = "beside_h2d", "h2d_beside", "attention_beside_h2d", "h2d_beside_attention"
"""What link and CPU leave each other; 0 where that is not known."""


@dataclass(frozen=True)
class Resource:
    """One figure of a machine, in ``unit``, and the machine with another one."""

    key: str
    name: str
    unit: str
    of: Callable[[HardwareProfile], float]
    with_amount: Callable[[HardwareProfile, float], HardwareProfile]

    @property
    def is_capacity(self) -> bool:
        return self.unit == "GB"


def resources(hardware: HardwareProfile, model: ModelSpec) -> tuple[Resource, ...]:
    """Those that this machine has, and whose amount is known."""
    every = (*MEMORY_AND_LINKS, products(model), *COMPUTE)
    return tuple(r for r in every if (hardware.gpu or r.key not in ("vram", "pcie")) and r.of(hardware))


def _capacity(key: str) -> tuple[Callable[[HardwareProfile], float], Callable[[HardwareProfile, float], HardwareProfile]]:
    field = f"{key}_bytes"
    return (lambda h: getattr(h, field) / GB), (lambda h, amount: replace(h, **{field: round(amount * GB)}))


def _ssd_gbps(hardware: HardwareProfile) -> float:
    return max(point.gbps for point in hardware.ssd_read)


def _with_ssd(hardware: HardwareProfile, gbps: float) -> HardwareProfile:
    """Every point of the curve in proportion."""
    factor = gbps / _ssd_gbps(hardware)
    return replace(hardware, ssd_read=tuple(replace(p, gbps=p.gbps * factor) for p in hardware.ssd_read))


def _with_bus(hardware: HardwareProfile, gbps: float) -> HardwareProfile:
    """What link and CPU leave each other grows in proportion, until they do not disturb each other."""
    factor, host = gbps / hardware.dram_bus_gbps, hardware.host
    shares = {name: min(1.0, getattr(host, name) * factor) for name in SHARES_LEFT} if host else {}
    return replace(hardware, dram_bus_gbps=gbps, host=host and replace(host, **shares))


def products(model: ModelSpec) -> Resource:
    """The CPU's beside a card: their fastest rate with ``model``'s FFNs or experts, in the type that it computes in; with its LM head where
    there is none. With more of it products of all formats, and attention, go faster in proportion."""

    def gbps(hardware: HardwareProfile) -> float:
        if hardware.host is None:
            return 0.0
        rates, head = hardware.host.computing(model.compute_dtype), () if model.experts else (model.lm_head.format,)
        return rates.peak_of(model.ffn_formats) or rates.peak_of(head)

    def with_amount(hardware: HardwareProfile, amount: float) -> HardwareProfile:
        return with_products(hardware, amount / gbps(hardware))

    return Resource("host", "CPU products", "GB/s", gbps, with_amount)


def with_products(hardware: HardwareProfile, factor: float, most_gbps: float = math.inf) -> HardwareProfile:
    """The CPU's products of all formats, and its attention, ``factor`` times as fast, of which none passes ``most_gbps`` by it."""
    host = hardware.host
    assert host is not None
    bf16, f16 = ({name: _faster(curve, factor, most_gbps) for name, curve in kinds.items()} for kinds in (host.products, host.f16_products))
    attention = min(host.attention_gbps * factor, max(host.attention_gbps, most_gbps))
    return replace(hardware, host=replace(host, products=bf16, f16_products=f16, attention_gbps=attention))


def _with_pcie(hardware: HardwareProfile, gbps: float) -> HardwareProfile:
    """Both directions in proportion, and what several links carry together."""
    gpu, links = _gpu(hardware), hardware.links
    factor = gbps / gpu.h2d.peak
    links = replace(links, together=None if links.together is None else _faster(links.together, factor))
    rates = {name: getattr(gpu, name) * factor for name in ("h2d_pageable_gbps", "h2d_with_d2h_gbps")}
    return replace(hardware, links=links, gpu=replace(gpu, h2d=_faster(gpu.h2d, factor), d2h=_faster(gpu.d2h, factor), **rates))


def _with_weight_rate(hardware: HardwareProfile, gbps: float) -> HardwareProfile:
    """Decoding in proportion."""
    factor, gpu = gbps / hardware.weight_gbps, hardware.gpu
    if gpu is None:
        decode, products = _rates(hardware.cpu_decode, factor), _rates(hardware.cpu_products, factor)
        attention_gbps = hardware.cpu_attention_gbps * factor
        return replace(hardware, cpu_matvec_gbps=gbps, cpu_attention_gbps=attention_gbps, cpu_decode=decode, cpu_products=products)
    return replace(hardware, gpu=replace(gpu, memory_gbps=gbps, decode=_rates(gpu.decode, factor), products=_rates(gpu.products, factor)))


def _with_matrix_rate(hardware: HardwareProfile, tflops: float) -> HardwareProfile:
    """Attention in proportion, and a card that has rested."""
    gpu = hardware.gpu
    if gpu is None:
        factor = tflops / hardware.cpu_dense_tflops
        return replace(hardware, cpu_dense_tflops=tflops, cpu_attention_tflops=hardware.cpu_attention_tflops * factor)
    factor = tflops / gpu.dense_tflops
    rates = {name: getattr(gpu, name) * factor for name in ("attention_tflops", "burst_tflops")}
    return replace(hardware, gpu=replace(gpu, dense_tflops=tflops, **rates))


def _gpu(hardware: HardwareProfile) -> Gpu:
    assert hardware.gpu is not None
    return hardware.gpu


def _rates(rates: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: rate * factor for name, rate in rates.items()}


def _faster(curve: Curve, factor: float, most_gbps: float = math.inf) -> Curve:
    return Curve(tuple((size, min(rate * factor, max(rate, most_gbps))) for size, rate in curve.points))


def _of_cards(
    of: Callable[[HardwareProfile], float], with_amount: Callable[[HardwareProfile, float], HardwareProfile]
) -> tuple[Callable[[HardwareProfile], float], Callable[[HardwareProfile, float], HardwareProfile]]:
    """A figure of the first card, with which those of unlike ones change in proportion."""

    def with_all(hardware: HardwareProfile, amount: float) -> HardwareProfile:
        factor, others = amount / of(hardware), []
        for card in hardware.others:
            alone = replace(hardware, vram_bytes=card.vram_bytes, gpu=card.gpu, others=())
            changed = with_amount(alone, of(alone) * factor)
            others.append(replace(card, vram_bytes=changed.vram_bytes, gpu=_gpu(changed)))
        return replace(with_amount(hardware, amount), others=tuple(others))

    return of, with_all


MEMORY_AND_LINKS = (
    Resource("vram", "VRAM", "GB", *_of_cards(*_capacity("vram"))),
    Resource("dram", "DRAM", "GB", *_capacity("dram")),
    Resource("bus", "DRAM bus", "GB/s", lambda h: h.dram_bus_gbps, _with_bus),
    Resource("ssd", "SSD read", "GB/s", _ssd_gbps, _with_ssd),
    Resource("pcie", "PCIe", "GB/s", *_of_cards(lambda h: _gpu(h).h2d.peak, _with_pcie)),
)
COMPUTE = (
    Resource("weights", "weight reads", "GB/s", *_of_cards(lambda h: h.weight_gbps, _with_weight_rate)),
    Resource("matrices", "matrices", "TFLOP/s", *_of_cards(lambda h: h.dense_tflops, _with_matrix_rate)),
)
"""By its memory's rate, by which decode goes, and its matrix rate."""
AMOUNTS = {resource.key: resource for resource in (*MEMORY_AND_LINKS, *COMPUTE)}
"""Those that mean the same for any model."""
