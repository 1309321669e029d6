"""KV kept for later prompts: which pages a prompt finds, what restoring them takes, and from which length on that beats computing.

Pages are restored before the first pass of the rest, as one pipeline: SSD to DRAM, over the link, into the sequences' KV. A restored
prefill takes the slowest of these stages, then the prefill of the rest. No link carries pages and streamed weights for longer than that
sum, since what a pass streams early it need not stream late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.planner.common.measures import GB
from penstock.planner.contract.bills.prefill import Prefill
from penstock.planner.contract.decided.decisions import KvPages, Tier
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.price import Price, Resource
from penstock.planner.contract.prices.sizes import kept_file_pages, kept_page_bytes
from penstock.planner.contract.prices.stages import ssd_gbps


@dataclass(frozen=True)
class KeptSet:
    """What a workload's prompts share with earlier ones, in pages that hold all layers. Where room is for a part of the set only, each
    prefix is found in the same share, from its beginning on."""

    page_tokens: int
    prefix_pages: int
    """Full pages of one prompt's shared prefix, its last token apart, which is always computed."""
    pages: int
    """Of all prefixes that are worth keeping."""
    prefixes: int
    """Different ones among them."""

    @property
    def whole(self) -> int:
        """Pages that must be kept for a prompt to find all of its prefix."""
        return max(self.pages, self.prefix_pages)

    def restored_tokens(self, kept: int) -> int:
        """Tokens at the head of each prompt that are restored when ``kept`` pages are."""
        return self.prefix_pages * kept // self.whole * self.page_tokens if self.whole else 0

    def needed(self, prefix_pages: int) -> int:
        """The fewest pages kept with which so many pages of each prompt are restored."""
        return -(-prefix_pages * self.whole // self.prefix_pages) if prefix_pages else 0

    def moved(self, batch: int) -> float:
        """Pages that a batch asks for per page kept in a tier: one that several sequences begin with is brought once, and they share it."""
        return min(batch, self.prefixes) * self.prefix_pages / self.whole if self.whole else 0.0


def kept_set(workload: Workload, page_tokens: int) -> KeptSet:
    """The set that ``workload`` asks for; empty where it keeps nothing, or no prefix fills a page."""
    shared, kept = workload.shared_prefix_tokens, workload.kept_tokens
    prefix = min(shared, workload.prompt_tokens - 1) // page_tokens if kept else 0
    if not shared:
        return KeptSet(page_tokens, 0, kept // page_tokens, 0)
    return KeptSet(page_tokens, prefix, prefix * kept // shared, -(-kept // shared))


@dataclass(frozen=True)
class Restoring:
    """Rates at which pages of ``page_bytes`` come back, in GB/s."""

    page_bytes: int
    ssd_gbps: float
    h2d_gbps: float
    """Each page one copy. Infinite without a GPU, where pages are where they are computed with."""
    copy_gbps: float
    """From where pages arrive into the pool's slots."""
    bus_gbps: float
    """Through the host's memory; infinite where it is not known."""
    on_card: bool

    def bill(self, pages: Mapping[Tier, float]) -> Price:
        """To bring ``pages``, counted by the nearest tier that has them. Those that VRAM has are shared: they cost nothing."""
        page_gb = self.page_bytes / GB
        ssd, outside = pages.get(Tier.ssd, 0), pages.get(Tier.ssd, 0) + pages.get(Tier.dram, 0)
        passed = ssd + (outside if self.on_card else 2 * outside)
        return Price(
            {
                Resource.ssd: ssd * page_gb / self.ssd_gbps,
                Resource.dram: passed * page_gb / self.bus_gbps,
                Resource.h2d: outside * page_gb / self.h2d_gbps,
                Resource.card if self.on_card else Resource.cpu: outside * page_gb / self.copy_gbps,
            }
        )

    def seconds(self, pages: Mapping[Tier, float]) -> float:
        """Of the slowest resource."""
        return self.bill(pages).lasts()


def restoring(hardware: HardwareProfile, model: ModelSpec, page_tokens: int, queue_depth: int) -> Restoring:
    """The rates of pages of ``page_tokens`` tokens, ``queue_depth`` of them read from the SSD at once."""
    gpu, nbytes = hardware.gpu, kept_page_bytes(model, page_tokens)
    return Restoring(
        nbytes,
        ssd_gbps(hardware, nbytes, queue_depth),
        gpu.h2d.at(nbytes) if gpu else float("inf"),
        gpu.memory_gbps / 2 if gpu else hardware.copying_gbps,
        hardware.dram_bus_gbps or float("inf"),
        gpu is not None,
    )


def held(model: ModelSpec, kv: KvPages, kept: KeptSet) -> dict[Tier, int]:
    """Pages of the set by the nearest tier that has them: the SSD has copies of what the others hold."""
    vram = min(kv.reuse.vram_pages, kept.pages)
    dram = min(kv.reuse.dram_pages, kept.pages - vram)
    ssd = min(kept_file_pages(model, kv), kept.pages) - vram - dram
    return {Tier.vram: vram, Tier.dram: dram, Tier.ssd: max(0, ssd)}


def expected(prefill: Prefill) -> tuple[int, float]:
    """(tokens at the head of each prompt that are restored, seconds that this takes), once earlier prompts were computed. (0, 0) if
    computing is as fast."""
    kv, batch = prefill.decisions.kv, prefill.decisions.batch
    kept = kept_set(prefill.workload, kv.page_tokens)
    pages = held(prefill.model, kv, kept)
    start = kept.restored_tokens(sum(pages.values()))
    if not start:
        return 0, 0.0
    rates = restoring(prefill.hardware, prefill.model, kv.page_tokens, prefill.decisions.weights.ssd.queue_depth)
    restore_s = rates.seconds({tier: n * kept.moved(prefill.workload.together(batch)) for tier, n in pages.items()})
    return (start, restore_s) if restore_s < saved_s(prefill, start) else (0, 0.0)


def saved_s(prefill: Prefill, start: int) -> float:
    """Seconds that the prefill saves by beginning at token ``start``. 0 while the rest takes as many passes over streamed weights, if these
    bind."""
    return prefill.seconds() - prefill.seconds(start)


def pays(prefill: Prefill, tier: Tier, pages: int) -> bool:
    """Whether restoring ``pages`` of each prompt from ``tier`` takes less time than computing them. Each sequence of a batch has a head of
    its own, unless the workload says that they share it."""
    decisions, page_tokens = prefill.decisions, prefill.decisions.kv.page_tokens
    if tier is Tier.vram and prefill.hardware.gpu is None:
        return False
    rates = restoring(prefill.hardware, prefill.model, page_tokens, decisions.weights.ssd.queue_depth)
    together = prefill.workload.together(decisions.batch)
    different = min(together, kept_set(prefill.workload, page_tokens).prefixes or together)
    return rates.seconds({tier: pages * different}) < saved_s(prefill, pages * page_tokens)


@dataclass(frozen=True)
class BreakEven:
    """Tokens of the shortest head of a prompt that is restored from a tier in less time than it is computed in; None where even the
    longest is not."""

    vram: int | None
    dram: int | None
    ssd: int | None

    def of(self, tier: Tier) -> int | None:
        """Tokens for ``tier``."""
        return {Tier.vram: self.vram, Tier.dram: self.dram, Tier.ssd: self.ssd}[tier]


def break_even(prefill: Prefill) -> BreakEven:
    """For prompts of the workload's length, in full pages."""
    page_tokens = prefill.decisions.kv.page_tokens
    lengths = range(1, (prefill.workload.prompt_tokens - 1) // page_tokens + 1)
    firsts = (next((n for n in lengths if pays(prefill, tier, n)), None) for tier in Tier)
    return BreakEven(*(None if n is None else n * page_tokens for n in firsts))
