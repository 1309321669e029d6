"""What of a machine could be had more of: capacities and rates, each as one figure that can be changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from penstock.planner.common.measures import GB
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile


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


def resources(hardware: HardwareProfile) -> tuple[Resource, ...]:
    """Those that this machine has, and whose amount is known."""
    return tuple(r for r in ALL if (hardware.gpu or r.key not in ("vram", "pcie")) and r.of(hardware))


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
    shares = {name: min(1.0, getattr(host, name) * factor) for name in ("beside_h2d", "h2d_beside")} if host else {}
    return replace(hardware, dram_bus_gbps=gbps, host=host and replace(host, **shares))


def _host_gbps(hardware: HardwareProfile) -> float:
    return hardware.host.peak_gbps if hardware.host else 0.0


def _with_host(hardware: HardwareProfile, gbps: float) -> HardwareProfile:
    """Products of all formats, and attention, in proportion."""
    factor, host = gbps / _host_gbps(hardware), hardware.host
    assert host is not None
    products, halves = ({name: _faster(curve, factor) for name, curve in curves.items()} for curves in (host.products, host.f16_products))
    return replace(hardware, host=replace(host, products=products, f16_products=halves, attention_gbps=host.attention_gbps * factor))


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
        return replace(hardware, cpu_matvec_gbps=gbps, cpu_decode=decode, cpu_products=products)
    return replace(hardware, gpu=replace(gpu, memory_gbps=gbps, decode=_rates(gpu.decode, factor), products=_rates(gpu.products, factor)))


def _with_matrix_rate(hardware: HardwareProfile, tflops: float) -> HardwareProfile:
    """Attention in proportion."""
    if hardware.gpu is None:
        return replace(hardware, cpu_dense_tflops=tflops)
    attention = hardware.gpu.attention_tflops * tflops / hardware.gpu.dense_tflops
    return replace(hardware, gpu=replace(hardware.gpu, dense_tflops=tflops, attention_tflops=attention))


def _gpu(hardware: HardwareProfile) -> Gpu:
    assert hardware.gpu is not None
    return hardware.gpu


def _rates(rates: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: rate * factor for name, rate in rates.items()}


def _faster(curve: Curve, factor: float) -> Curve:
    return Curve(tuple((size, rate * factor) for size, rate in curve.points))


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


ALL = (
    Resource("vram", "VRAM", "GB", *_of_cards(*_capacity("vram"))),
    Resource("dram", "DRAM", "GB", *_capacity("dram")),
    Resource("bus", "DRAM bus", "GB/s", lambda h: h.dram_bus_gbps, _with_bus),
    Resource("ssd", "SSD read", "GB/s", _ssd_gbps, _with_ssd),
    Resource("pcie", "PCIe", "GB/s", *_of_cards(lambda h: _gpu(h).h2d.peak, _with_pcie)),
    Resource("host", "CPU products", "GB/s", _host_gbps, _with_host),
    Resource("weights", "weight reads", "GB/s", *_of_cards(lambda h: h.weight_gbps, _with_weight_rate)),
    Resource("matrices", "matrices", "TFLOP/s", *_of_cards(lambda h: h.dense_tflops, _with_matrix_rate)),
)
"""Capacities and links first, then what computes: its memory's rate, by which decode goes, and its matrix rate."""
AMOUNTS = {resource.key: resource for resource in ALL}
