"""What a plan assumes of its machine, and from where each figure is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.contract.given.formats import Dtype, Format
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.decoding import decode_gelements, is_product, is_timed, product_gbps
from penstock.planner.render.whereabouts import beside_card, experts_beside


def assumed(hardware: HardwareProfile, model: ModelSpec, ranks: int = 1) -> Iterator[tuple[str, str, str]]:
    """(figure, its value, where it is from), with what several ``ranks`` share."""
    gpu, from_ = hardware.gpu, partial(origin_of, hardware)
    best = max(hardware.ssd_read, key=lambda p: p.gbps)
    if gpu:
        yield "VRAM", show_bytes(hardware.vram_bytes), from_("vram_bytes")
    yield "DRAM", show_bytes(hardware.dram_bytes), from_("dram_bytes")
    yield "SSD", show_bytes(hardware.ssd_bytes), from_("ssd_bytes")
    yield "SSD read", f"up to {best.gbps:.3g} GB/s", from_("ssd.read")
    if hardware.dram_bus_gbps:
        yield "DRAM bus", f"{hardware.dram_bus_gbps:.3g} GB/s", from_("dram.bus_gbps")
    if gpu:
        yield "H2D", f"{gpu.h2d.peak:.3g} GB/s", from_("gpu.h2d")
        if ranks > 1:
            here = ranks // hardware.hosts
            alone = hardware.links_gbps(here)
            at_once = hardware.hosts * alone * hardware.links.share(here, alone)
            known = "as fast as each alone: not measured" if hardware.links.together is None else from_("links.together_gbps")
            yield f"{ranks} links", f"{at_once:.3g} GB/s at once", known
        yield "weights", f"{gpu.memory_gbps:.4g} GB/s from VRAM", from_("gpu.memory_gbps")
        yield "matrices", f"{gpu.dense_tflops:.3g} TFLOP/s", from_("gpu.dense_tflops")
        if gpu.burst_tflops:
            yield "", f"{gpu.burst_tflops:.3g} TFLOP/s for {show_seconds(gpu.burst_s)} behind a rest", from_("gpu.burst_tflops")
        yield "attention", f"{gpu.attention_tflops:.3g} TFLOP/s", from_("gpu.attention_tflops")
    else:
        yield "weights", f"{hardware.cpu_matvec_gbps:.3g} GB/s from DRAM", from_("cpu.matvec_gbps")
        yield "matrices", f"{hardware.cpu_dense_tflops:.3g} TFLOP/s", from_("cpu.dense_tflops")
        if hardware.cpu_attention_gbps:
            yield "attention", f"{hardware.cpu_attention_gbps:.3g} GB/s of K and V", from_("cpu.attention_gbps")
            yield "", f"{hardware.attention_tflops:.3g} TFLOP/s, prompts", from_("cpu.attention_tflops")
    for card in hardware.others:
        yield f"GPU {card.device}", f"{card.gpu.name}, {show_bytes(card.vram_bytes)}, H2D of {card.gpu.h2d.peak:.3g} GB/s", from_("others")
    for form in sorted({unit.format for unit in model.coded}, key=lambda form: form.name):
        yield form.name, *_decoding(hardware, form, from_("gpu.decode" if gpu else "cpu.decode"))
    if ranks > 1 and ranks > hardware.hosts:
        yield "hops", f"{show_seconds(hardware.links.hop_s)} each", from_("links.hop_s")
        if hardware.links.vram_bytes:
            yield "", f"{show_bytes(hardware.links.vram_bytes)} of each card", from_("links.vram_bytes")
        if hardware.links.word_hop_s and hardware.hosts == 1:
            yield "", f"{show_seconds(hardware.links.word_hop_s)} each in a recorded step", from_("links.word_hop_s")
    if hardware.hosts > 1 and (network := hardware.network) is not None:
        yield "hosts", f"{hardware.hosts}, of all above each", "hardware.hosts"
        yield "network", f"{network.gbps:.3g} GB/s, hops of {show_seconds(network.hop_s)}", from_("network")
    yield "locking", f"{hardware.pin_s_per_gb:.2g} s/GB", from_("dram.pin_s_per_gb")


def products_beside(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The same of what the CPU multiplies by beside a card, or attends to, where ``plan`` has it do so in its workload's steps."""
    host, model, by = plan.hardware.host, plan.model, "CPU"
    kinds = {UnitKind.expert} if experts_beside(plan) else {UnitKind(unit.kind) for unit in beside_card(plan)}
    if host is None:
        return
    if plan.decisions.kv.host_layers:
        yield by, f"{host.attention_gbps:.3g} GB/s of K and V", origin_of(plan.hardware, "host.attention_gbps")
    rates, key = host.computing(model.compute_dtype), "host.f16_products" if model.compute_dtype is Dtype.float16 else "host.products"
    units = [unit for kind in kinds for unit in (*model.of_kind(kind), *((model.lm_head,) if kind is UnitKind.head else ()))]
    for form in sorted({unit.format for unit in units}, key=lambda form: form.name):
        if curve := rates.curve(form):
            yield by, f"{curve.at(plan.decisions.batch):.3g} GB/s of {form.name}", origin_of(plan.hardware, f"{key}.{form.name}")
            by = ""


def origin_of(hardware: HardwareProfile, path: str) -> str:
    """From where the figure ``path`` of a profile is, or what covers it; empty where nothing is said."""
    parts = path.split(".")
    return next((hardware.origin[key] for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in hardware.origin), "")


def _decoding(hardware: HardwareProfile, form: Format, origin: str) -> tuple[str, str]:
    """How fast ``form`` is decoded, and multiplied as it is stored where that is done."""
    timed = is_timed(hardware.gpu.decode if hardware.gpu else hardware.cpu_decode, form)
    said = f"decoded at {_rate(decode_gelements(hardware, form))} G/s"
    if is_product(hardware, form, 1):
        said += f", read at {_rate(product_gbps(hardware, form))} GB/s"
    return said, origin if timed else "derived: shares of the rate of weights; `planner probe` times decoders"


def _rate(value: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
