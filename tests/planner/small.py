"""Small machines, models and workloads, made on the spot: a test names only what it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.formats import FORMATS, Dtype
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile, SsdPoint
from penstock.planner.contract.given.model import ModelSpec, Routers
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec
from penstock.planner.contract.given.workload import Objective, Workload

MB = 10**6
GB = 10**9
ROUTER = 16 * 1024
"""Bytes of an FFN unit whose experts are units of their own."""


def gpu(**change: Any) -> Gpu:
    curve = Curve(((2**18, 20.0), (2**20, 40.0), (2**24, 54.0), (2**26, 55.0)))
    base = Gpu("small", 100 * MB, 100.0, 50.0, 800.0, curve, curve, 7.0, 45.0)
    return replace(base, **change)


def machine(vram: int = 16 * GB, dram: int = 64 * GB, ssd: int = 500 * GB, **change: Any) -> HardwareProfile:
    """A machine with a GPU when ``vram`` is not 0."""
    points = tuple(SsdPoint(block, depth, rate) for block, depth, rate in ((2**22, 4, 1.5), (2**22, 8, 5.0), (2**24, 8, 7.0)))
    base = HardwareProfile("small", vram, dram, ssd, points, 4.0, 40.0, 120.0, 0.2, 8, 50.0, 1.5, 2e-4, gpu() if vram else None)
    return replace(base, **change)


def model(
    layers: int = 8, attn: int = 40 * MB, ffn: int = 120 * MB, table: int = 60 * MB, tied: bool = False, experts: int = 0
) -> ModelSpec:
    """A uniform decoder; ``experts`` cut the FFN units into as many routed experts (top-2), beside a router."""
    routers = Routers(2, default_hit_rates(experts, 2)) if experts else None
    vocab, hidden = 1000, 1024
    table = table // vocab * vocab
    units = [*blocks(UnitKind.attn, (attn,) * layers), *blocks(UnitKind.ffn, (ROUTER if experts else ffn,) * layers)]
    units += blocks(UnitKind.expert, (ffn // experts,) * layers, experts) if experts else ()
    units += [bf16(UnitKind.norm, None, MB), bf16(UnitKind.embed, None, table)]
    units += [] if tied else [bf16(UnitKind.head, None, table)]
    sizes = tied, vocab, hidden, 1024, 256, 4096, Dtype.bfloat16, Dtype.bfloat16
    return ModelSpec("small", "llama", tuple(units), *sizes, routers)


def bf16(kind: UnitKind, layer: int | None, stored_bytes: int, count: int = 1) -> UnitSpec:
    return UnitSpec(kind, layer, stored_bytes, stored_bytes // 2, FORMATS["BF16"], count)


def blocks(kind: UnitKind, sizes: tuple[int, ...], count: int = 1) -> list[UnitSpec]:
    """A unit of ``kind`` for each layer."""
    return [bf16(kind, layer, size, count) for layer, size in enumerate(sizes)]


def with_units(model: ModelSpec, *units: UnitSpec) -> ModelSpec:
    """``model`` with ``units`` in place of its units of the same kinds."""
    kinds = {unit.kind for unit in units}
    return replace(model, units=(*units, *(unit for unit in model.units if unit.kind not in kinds)))


def work(**change: Any) -> Workload:
    base = Workload("small", 1, 512, 64, 1, 0, Objective.latency, 10 * MB, 0, False)
    return replace(base, **change)
