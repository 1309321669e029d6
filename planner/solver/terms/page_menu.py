"""The KV page size: from the measured curves where pages are kept for prompts to come, else the one that wastes least."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.common.measures import ALIGN, GB, show_bytes, show_seconds
from penstock.planner.contract.bills.reuse import Restoring, restoring
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.sizes import kept_page_bytes, kv_page_bytes, pool_pages
from penstock.planner.contract.prices.stages import prefill_compute_s
from penstock.planner.contract.rules.limits import LIMITS


@dataclass(frozen=True)
class PageChoice:
    """KV pages of ``page_tokens`` that the workload needs at one batch in one layer."""

    page_tokens: int
    pages: int
    page_bytes: int

    @property
    def layer_bytes(self) -> int:
        """K and V of one layer."""
        return self.pages * self.page_bytes


def page_menu(hardware: HardwareProfile, model: ModelSpec, workload: Workload, force: Force, batch: int) -> list[PageChoice]:
    """The page size. Without reuse: of those that waste least, the largest, since a layer's pages move together, so only their bytes
    count. With it: the one whose prefixes come back soonest, what is computed again for want of a full page included. A server that keeps
    none: the smallest that the SSD can keep, since rows come and go and share whole pages alone."""
    if force.page_tokens is not None:
        return [_choice(model, workload, batch, force.page_tokens)]
    if workload.kept_tokens:
        sizes = candidates(model)
        return [_choice(model, workload, batch, min(sizes, key=lambda t: PageCost.of(hardware, model, workload, t).seconds))]
    least = LIMITS.ssd_page_tokens_min if workload.kv_spill else 0
    sizes = [min(candidates(model))] if workload.is_served else [t for t in LIMITS.page_tokens if t >= least]
    choices = [_choice(model, workload, batch, t) for t in sizes]
    return [min(choices, key=lambda c: (c.layer_bytes, -c.page_tokens))]


def _choice(model: ModelSpec, workload: Workload, batch: int, page_tokens: int) -> PageChoice:
    return PageChoice(page_tokens, pool_pages(workload, batch, page_tokens), kv_page_bytes(model, page_tokens))


def candidates(model: ModelSpec) -> list[int]:
    """Sizes of pages that an SSD can keep. A layer's page is a multiple of 4096 bytes, and of half a megabyte if any size is that large."""
    whole = [t for t in LIMITS.page_tokens if t >= LIMITS.ssd_page_tokens_min and not kv_page_bytes(model, t) % ALIGN]
    return [t for t in whole if kv_page_bytes(model, t) >= LIMITS.layer_read_bytes] or whole or [LIMITS.ssd_page_tokens_min]


@dataclass(frozen=True)
class PageCost:
    """What one page size costs a prompt whose head was kept."""

    page_tokens: int
    rates: Restoring
    moved_s: float
    """The prefix once from the SSD and once over the link, one page at a time at the rates of that size."""
    again_s: float
    """Computing the part of a prefix that fills no page: half a page on average, all of a prefix shorter than that."""
    room_s: float
    """Half a page of a sequence's own KV stays empty: streaming once the weights that could lie there."""

    @property
    def seconds(self) -> float:
        return self.moved_s + self.again_s + self.room_s

    @classmethod
    def of(cls, hardware: HardwareProfile, model: ModelSpec, workload: Workload, page_tokens: int) -> PageCost:
        prefix = workload.shared_prefix_tokens or workload.prompt_tokens
        depth = max(p.queue_depth for p in hardware.ssd_read)
        rates = restoring(hardware, model, page_tokens, depth)
        again = prefix if prefix < page_tokens else page_tokens / 2
        pages = (prefix - again) / page_tokens
        page_gb = rates.page_bytes / GB
        moved_s = pages * page_gb * (1 / rates.ssd_gbps + 1 / rates.h2d_gbps)
        whole_s = prefill_compute_s(hardware, model, workload, 1, workload.prompt_tokens)
        link_gbps = hardware.gpu.h2d.peak if hardware.gpu else max(p.gbps for p in hardware.ssd_read)
        return cls(page_tokens, rates, moved_s, again / workload.prompt_tokens * whole_s, page_gb / 2 / link_gbps)


def told(hardware: HardwareProfile, model: ModelSpec, workload: Workload, page_tokens: int, forced: bool) -> str:
    """Why kept pages have this size, in one sentence."""
    cost = PageCost.of(hardware, model, workload, page_tokens)
    rates, layer = cost.rates, kv_page_bytes(model, page_tokens)
    ssd = max(p.gbps for p in hardware.ssd_read)
    link = f"copied at {rates.h2d_gbps:.3g} of {hardware.gpu.h2d.peak:.3g} GB/s, " if hardware.gpu else ""
    text = (
        f"KV pages of {page_tokens} tokens: {show_bytes(kept_page_bytes(model, page_tokens))}, {show_bytes(layer)} a layer, {link}"
        f"read at {rates.ssd_gbps:.3g} of {ssd:.3g} GB/s; half a page computed again takes {show_seconds(cost.again_s)}"
    )
    if forced:
        return f"{text}; the size was forced"
    others = [PageCost.of(hardware, model, workload, t) for t in candidates(model) if t != page_tokens]
    prefix = workload.shared_prefix_tokens or workload.prompt_tokens
    beside = "".join(f", {show_seconds(o.seconds)} in pages of {o.page_tokens}" for o in others)
    return f"{text}; restoring {prefix} tokens in pages of {page_tokens} costs {show_seconds(cost.seconds)} in all{beside}"
