"""What each link takes of the host's memory bus while it works."""

from __future__ import annotations

from penstock.planner.common.measures import GB
from penstock.planner.common.timeline.spans import CPU, D2H, H2D, SSD
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.prices.stages import h2d_gbps, ssd_gbps


def bus_shares(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> dict[str, float]:
    """Link -> the share of the host's memory bus that it takes at full speed; the CPU's product is that with ``model``'s FFNs or experts,
    or with its LM head where that is all that the CPU computes: by a step's rows, where experts are routed by one.

    Without a GPU the CPU's own reads are left out: a prompt's products read little, and the rate of a decode step's was measured on the
    same bus.
    """
    weights = decisions.weights
    rates = {SSD: ssd_gbps(hardware, weights.ssd.block_bytes, weights.ssd.queue_depth)}
    if gpu := hardware.gpu:
        rates |= {H2D: h2d_gbps(gpu, weights.h2d.chunk_bytes, weights.h2d.chunk_bytes), D2H: gpu.d2h.peak}
    if hardware.host:
        head_alone = weights.host.head and not weights.host.ffn
        multiplied = (model.lm_head.format,) if head_alone else model.ffn_formats
        rates_of = hardware.host.computing(model.compute_dtype)
        rows = decisions.batch if model.experts is None else 1
        products = max((curve.at(rows) for form in multiplied if (curve := rates_of.curve(form))), default=0.0)
        rates[CPU] = hardware.host.attention_gbps if decisions.kv.host_layers else products
    return {link: hardware.bus_s(gbps * GB) for link, gbps in rates.items()}


def beside_shares(hardware: HardwareProfile, decisions: Decisions) -> dict[str, float]:
    """Link -> the share of its speed that is left while copies and the CPU's products, or its attention, go on together."""
    host = hardware.host.attending if hardware.host and decisions.kv.host_layers else hardware.host
    return {CPU: host.beside_h2d, H2D: host.h2d_beside} if host else {}
