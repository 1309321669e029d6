"""Hardware of a configuration, as the frozen profile that everything else uses, and back. Values are checked here, each by the name that a
user sets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from penstock.planner.common.errors import UserError, nearest
from penstock.planner.common.measures import show_bytes
from penstock.planner.common.outside.bounds import CORES, EXABYTE, MOST_DEPTH, RATE, check_bounds
from penstock.planner.contract.config.config_schema import (
    CardConfig,
    GpuConfig,
    HardwareConfig,
    HostConfig,
    LinksConfig,
)
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.given.formats import KNOWN_FORMATS, no_such_format
from penstock.planner.contract.given.hardware import Card, Gpu, HardwareProfile, SsdPoint
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.given.links import GLOO, NCCL, Links
from penstock.planner.contract.given.network import Network


def hardware_from(cfg: HardwareConfig) -> HardwareProfile:
    """The profile that ``cfg`` describes. ``vram_bytes`` 0 computes on the CPU. Raises UserError naming the key.

    Rates that a plan can do without may be 0: not measured.
    """
    _measured(cfg)
    _not_in_gigabytes(cfg, "vram_bytes", "dram_bytes", "ssd_bytes")
    check_bounds(cfg if cfg.vram_bytes > 0 else replace(cfg, gpu=None), "hardware")
    _check_spread(cfg.spread)
    gpu, vram_bytes = _gpu(cfg.gpu) if cfg.gpu is not None and cfg.vram_bytes > 0 else None, cfg.vram_bytes
    devices, others = _devices(cfg.devices, gpu is not None), dict[int, Card]()
    if cfg.vram_bytes > 0 and gpu is None:
        raise UserError(
            f"hardware.vram_bytes={cfg.vram_bytes}: the profile {cfg.name} describes no GPU; set it to 0, or choose hardware= with a GPU"
        )
    if gpu is not None and gpu.context_bytes >= cfg.vram_bytes:
        raise UserError(
            f"hardware.vram_bytes={cfg.vram_bytes}: the CUDA context alone takes {show_bytes(gpu.context_bytes)}; "
            "give more, or 0 to compute on the CPU"
        )
    if gpu is not None:
        others = _unlike(cfg.others, Card(devices[0] if devices else 0, vram_bytes, gpu), devices)
        first = others.pop(devices[0]) if devices else None
        gpu, vram_bytes = (gpu, vram_bytes) if first is None else (first.gpu, first.vram_bytes)
    return HardwareProfile(
        name=cfg.name,
        vram_bytes=vram_bytes,
        dram_bytes=cfg.dram_bytes,
        ssd_bytes=cfg.ssd_bytes,
        ssd_read=_ssd_points(cfg.ssd.read),
        ssd_write_gbps=cfg.ssd.write_gbps,
        dram_copy_gbps=cfg.dram.copy_gbps,
        dram_bus_gbps=cfg.dram.bus_gbps,
        pin_s_per_gb=cfg.dram.pin_s_per_gb,
        cpu_cores=cfg.cpu.cores,
        cpu_matvec_gbps=cfg.cpu.matvec_gbps,
        cpu_dense_tflops=cfg.cpu.dense_tflops,
        cpu_attention_gbps=cfg.cpu.attention_gbps,
        cpu_attention_tflops=cfg.cpu.attention_tflops,
        layer_launch_s=cfg.layer_launch_s,
        gpu=gpu,
        origin=dict(cfg.origin),
        pass_s=cfg.pass_s,
        start_s=cfg.start_s,
        spread=dict(cfg.spread),
        cpu_threads=cfg.cpu.threads,
        ssd_long_gbps=cfg.ssd.long_gbps,
        ssd_burst_s=cfg.ssd.burst_s,
        cpu_decode=_by_format("hardware.cpu.decode", cfg.cpu.decode),
        cpu_products=_by_format("hardware.cpu.products", cfg.cpu.products),
        host=_host(cfg.host) if cfg.host is not None and gpu is not None else None,
        devices=devices,
        others=tuple(others.values()),
        links=_links(cfg.links, gpu is not None),
        hosts=cfg.hosts,
        network=Network(cfg.network.gbps, cfg.network.hop_s) if cfg.network.gbps else None,
    )


def _devices(devices: list[int] | None, cards: bool) -> tuple[int, ...]:
    """Numbers of cards, each once. UserError for others, and for any where there are no ``cards``."""
    if devices is None:
        return ()
    if not cards:
        raise UserError(f"hardware.devices={devices}: this hardware has no GPU; leave it out (ranks=2 deals layers over its cores)")
    if not devices or len(set(devices)) < len(devices) or min(devices) < 0 or max(devices) > _MOST_DEVICE:
        raise UserError(f"hardware.devices={devices}: must be numbers of GPUs, each once, such as [0,1]; null is the first one")
    return tuple(devices)


def _unlike(cards: list[CardConfig], base: Card, devices: tuple[int, ...]) -> dict[int, Card]:
    """The first of ``devices``, and those that are unlike it, by their numbers; none where there are none. What ``cards`` do not name is
    ``base``. UserError naming the key."""
    named: dict[int, Card] = {}
    for number, cfg in enumerate(cards):
        key = f"hardware.others[{number}]"
        check_bounds(cfg, key)
        if cfg.device in named:
            raise UserError(f"{key}.device={cfg.device}: stands in two of them; keep one")
        card = Card(cfg.device, cfg.vram_bytes, _gpu(cfg.gpu, f"{key}.gpu"))
        if card.gpu.context_bytes >= card.vram_bytes:
            raise UserError(f"{key}.vram_bytes={card.vram_bytes}: the CUDA context alone takes {show_bytes(card.gpu.context_bytes)}")
        named[cfg.device] = card
    found = {device: named.get(device, replace(base, device=device)) for device in devices}
    first = found[devices[0]] if devices else base
    return {d: card for d, card in found.items() if d == first.device or replace(card, device=first.device) != first}


def _links(cfg: LinksConfig | None, cards: bool) -> Links:
    own = NCCL if cards else GLOO
    if cfg is None:
        return own
    together = _curve("hardware.links.together_gbps", cfg.together_gbps, "[GPUs, GB/s]") if cfg.together_gbps else None
    hop_s, p2p_gbps = own.hop_s if cfg.hop_s is None else cfg.hop_s, own.p2p_gbps if cfg.p2p_gbps is None else cfg.p2p_gbps
    vram_bytes = own.vram_bytes if cfg.vram_bytes is None else cfg.vram_bytes
    return Links(together, hop_s, p2p_gbps, word_hop_s=cfg.word_hop_s, vram_bytes=vram_bytes)


def _links_mapping(links: Links) -> dict[str, Any]:
    together = [] if links.together is None else [list(point) for point in links.together.points]
    own = {name: getattr(links, name) for name in ("hop_s", "p2p_gbps", "word_hop_s", "vram_bytes")}
    return {"together_gbps": together} | own


def hardware_mapping(profile: HardwareProfile) -> dict[str, Any]:
    """``profile`` in the shape of ``HardwareConfig``: what a plan file holds, and ``hardware_from`` takes back."""
    gpu = profile.gpu
    attention = {"attention_gbps": profile.cpu_attention_gbps, "attention_tflops": profile.cpu_attention_tflops}
    return {
        "name": profile.name,
        "vram_bytes": profile.vram_bytes,
        "dram_bytes": profile.dram_bytes,
        "ssd_bytes": profile.ssd_bytes,
        "ssd": {"read": [[p.block_bytes, p.queue_depth, p.gbps] for p in profile.ssd_read], "write_gbps": profile.ssd_write_gbps}
        | ({"long_gbps": profile.ssd_long_gbps, "burst_s": profile.ssd_burst_s} if profile.ssd_long_gbps else {}),
        "dram": {"copy_gbps": profile.dram_copy_gbps, "bus_gbps": profile.dram_bus_gbps, "pin_s_per_gb": profile.pin_s_per_gb},
        "cpu": {
            "cores": profile.cpu_cores,
            "threads": profile.cpu_threads,
            "matvec_gbps": profile.cpu_matvec_gbps,
            "dense_tflops": profile.cpu_dense_tflops,
        }
        | ({"decode": dict(profile.cpu_decode)} if profile.cpu_decode else {})
        | ({"products": dict(profile.cpu_products)} if profile.cpu_products else {})
        | {name: rate for name, rate in attention.items() if rate},
        "gpu": None if gpu is None else _gpu_mapping(gpu),
        **({} if profile.host is None else {"host": _host_mapping(profile.host)}),
        **({"devices": list(profile.devices)} if profile.devices else {}),
        **({"others": [_card_mapping(card) for card in profile.others]} if profile.others else {}),
        **({} if profile.links == _links(None, gpu is not None) else {"links": _links_mapping(profile.links)}),
        **({} if profile.hosts == 1 else {"hosts": profile.hosts}),
        **({} if profile.network is None else {"network": {"gbps": profile.network.gbps, "hop_s": profile.network.hop_s}}),
        "layer_launch_s": profile.layer_launch_s,
        "pass_s": profile.pass_s,
        "start_s": profile.start_s,
        "spread": dict(profile.spread),
        "origin": dict(profile.origin),
    }


def _card_mapping(card: Card) -> dict[str, Any]:
    return {"device": card.device, "vram_bytes": card.vram_bytes, "gpu": _gpu_mapping(card.gpu)}


def _gpu_mapping(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "context_bytes": gpu.context_bytes,
        "dense_tflops": gpu.dense_tflops,
        "attention_tflops": gpu.attention_tflops,
        "memory_gbps": gpu.memory_gbps,
        "h2d": [list(p) for p in gpu.h2d.points],
        "d2h": [list(p) for p in gpu.d2h.points],
        "h2d_pageable_gbps": gpu.h2d_pageable_gbps,
        "h2d_with_d2h_gbps": gpu.h2d_with_d2h_gbps,
        "copy_s": gpu.copy_s,
        "layer_kernels_s": gpu.layer_kernels_s,
        "prompt_piece_s": gpu.prompt_piece_s,
        **({"burst_tflops": gpu.burst_tflops, "burst_s": gpu.burst_s} if gpu.burst_tflops else {}),
    } | {name: dict(rates) for name, rates in (("decode", gpu.decode), ("products", gpu.products)) if rates}


def _gpu(cfg: GpuConfig, key: str = "hardware.gpu") -> Gpu:
    return Gpu(
        name=cfg.name,
        context_bytes=cfg.context_bytes,
        dense_tflops=cfg.dense_tflops,
        attention_tflops=cfg.attention_tflops,
        burst_tflops=cfg.burst_tflops,
        burst_s=cfg.burst_s,
        memory_gbps=cfg.memory_gbps,
        h2d=_curve(f"{key}.h2d", cfg.h2d),
        d2h=_curve(f"{key}.d2h", cfg.d2h),
        h2d_pageable_gbps=cfg.h2d_pageable_gbps,
        h2d_with_d2h_gbps=cfg.h2d_with_d2h_gbps,
        copy_s=cfg.copy_s,
        layer_kernels_s=cfg.layer_kernels_s,
        prompt_piece_s=cfg.prompt_piece_s,
        decode=_by_format(f"{key}.decode", cfg.decode),
        products=_by_format(f"{key}.products", cfg.products),
    )


def _host(cfg: HostConfig) -> HostRates:
    products, f16_products = (
        _host_curves(f"hardware.host.{key}", rates) for key, rates in (("products", cfg.products), ("f16_products", cfg.f16_products))
    )
    _known_formats("hardware.host.format_threads", cfg.format_threads)
    for name, threads in cfg.format_threads.items():
        if flaw := CORES.flaw(threads):
            raise UserError(f"hardware.host.format_threads.{name}={threads}: {flaw}; `planner probe` finds how many pay")
    rates = cfg.hop_s, cfg.beside_h2d, cfg.h2d_beside, cfg.attention_gbps, cfg.attention_hop_s
    attending = cfg.attention_beside_h2d, cfg.h2d_beside_attention
    return HostRates(cfg.threads, products, *rates, dict(cfg.format_threads), cfg.ahead_bytes, f16_products, *attending)


def _host_curves(key: str, rates: Mapping[str, list[list[Any]]]) -> dict[str, Curve]:
    _known_formats(key, rates)
    return {name: _curve(f"{key}.{name}", rows, "[rows, GB/s]") for name, rows in rates.items()}


def _host_mapping(host: HostRates) -> dict[str, Any]:
    found = {name: getattr(host, name) for name in HostRates.__dataclass_fields__}
    for key in ("products", "f16_products"):
        found[key] = {name: [list(point) for point in curve.points] for name, curve in found[key].items()}
    return {name: value for name, value in found.items() if value or name not in ("format_threads", "f16_products")}


def _known_formats(key: str, names: Iterable[str]) -> None:
    for name in names:
        if name not in KNOWN_FORMATS:
            raise no_such_format(f"{key}.{name}", name)


def _by_format(key: str, rates: Mapping[str, float]) -> dict[str, float]:
    _known_formats(key, rates)
    for name, rate in rates.items():
        if flaw := RATE.flaw(rate):
            raise UserError(f"{key}.{name}={rate}: {flaw}")
    return dict(rates)


_NEEDED = ("ssd.read", "cpu.matvec_gbps", "cpu.dense_tflops", "dram_bytes", "ssd_bytes", "layer_launch_s")
_NEEDED_GPU = ("gpu.dense_tflops", "gpu.attention_tflops", "gpu.memory_gbps", "gpu.h2d", "gpu.d2h")


def _measured(cfg: HardwareConfig) -> None:
    """Refuse a profile that lacks a figure which every plan needs, with the probe's own reason."""
    from penstock.planner.common.origins import unmeasured

    lacking = unmeasured(cfg.origin)
    needed = _NEEDED + (_NEEDED_GPU if cfg.gpu is not None and cfg.vram_bytes > 0 else ())
    for path in needed:
        value: Any = cfg
        for name in path.split("."):
            value = getattr(value, name)
        if path in lacking and not value:
            raise UserError(f"hardware.{path} was not measured ({lacking[path]}); run `planner probe` again, or set hardware.{path}=")


def _curve(key: str, rows: list[list[Any]], shape: str = "[bytes, GB/s]") -> Curve:
    points = tuple((int(size), float(rate)) for size, rate in _rows(key, rows, shape, 2))
    for (before, _), (after, _) in pairwise(points):
        if after <= before:
            raise UserError(f"{key}: {after} after {before}; the rows {shape} must ascend by their first number, each of them once")
    return Curve(points)


def _ssd_points(rows: list[list[Any]]) -> tuple[SsdPoint, ...]:
    key = "hardware.ssd.read"
    points = tuple(SsdPoint(int(b), int(d), float(r)) for b, d, r in _rows(key, rows, "[block_bytes, queue_depth, GB/s]", 3))
    seen = {(p.block_bytes, p.queue_depth) for p in points}
    if len(seen) < len(points):
        raise UserError(f"{key}: a block size and queue depth stands in two rows; keep one")
    return points


def _rows(key: str, rows: list[list[Any]], shape: str, width: int) -> list[list[Any]]:
    if not rows:
        raise UserError(f"{key}=[]: needs at least one row {shape}")
    for row in rows:
        if len(row) != width or not all(type(x) in (int, float) and 0 < x < math.inf for x in row):
            raise UserError(f"{key}: the row {list(row)} must be {shape}, all above 0")
        if any(x != int(x) for x in row[:-1]):
            raise UserError(f"{key}: the row {list(row)} must be {shape}, whole numbers before the rate")
        if row[0] > EXABYTE or max(row[1:-1], default=0) > MOST_DEPTH or RATE.flaw(row[-1]):
            depth = f" and {MOST_DEPTH} reads in flight" if width > 2 else ""
            most = f"at most {EXABYTE} {shape[1:].split(',')[0].removeprefix('block_')}{depth}, {RATE.least:g} to {RATE.most:g} GB/s"
            raise UserError(f"{key}: the row {list(row)} must be {shape}, {most}")
    return rows


_MOST_SPREAD = 1e3
_MOST_DEVICE = 1023


def _check_spread(spread: Mapping[str, float]) -> None:
    names = [figure.value for figure in Figure]
    for name, share in spread.items():
        if name not in names:
            raise UserError(f"hardware.spread.{name}: no such figure; choose of {', '.join(names)}{nearest(name, names)}")
        if not 0 <= share <= _MOST_SPREAD:
            raise UserError(f"hardware.spread.{name}={share}: must be 0 or more, at most {_MOST_SPREAD:g}")


def _not_in_gigabytes(cfg: HardwareConfig, *names: str) -> None:
    """A memory of some bytes is one whose unit was forgotten."""
    for name in names:
        value = getattr(cfg, name)
        if 0 < value < 1024:
            raise UserError(f"hardware.{name}={value}: {value} bytes hold no model; did you mean hardware.{name}={value}GB?")
