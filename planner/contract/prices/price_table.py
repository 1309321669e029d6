"""The table of prices: one unit of weights in one pass, by where it lies and who computes with it, and one layer's KV."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import Decisions, Tier
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import Experts
from penstock.planner.contract.prices.price import Amount, Place, Price, Resource, computing
from penstock.planner.contract.prices.sizes import expert_dram_bytes, expert_vram_bytes, unit_dram_bytes, unit_vram_bytes
from penstock.planner.contract.prices.stages import h2d_gbps, ssd_gbps


@dataclass(frozen=True)
class KvPrice:
    """Of KV that lies outside the device, at its sequences' end: read once, copied back once, written to the drive once."""

    read: Price = Price()
    back: Price = Price()
    written: Price = Price()

    def __add__(self, other: KvPrice) -> KvPrice:
        return KvPrice(self.read + other.read, self.back + other.back, self.written + other.written)

    def __mul__(self, count: Amount) -> KvPrice:
        return KvPrice(self.read * count, self.back * count, self.written * count)


@dataclass(frozen=True)
class PriceTable:
    """Of one machine, with reads of ``block_bytes`` at ``queue_depth`` and copies of at most ``chunk_bytes``.

    Seconds are those of each resource with nothing else on the way. ``Phase`` counts how often a phase pays a price.
    """

    hardware: HardwareProfile
    block_bytes: int
    queue_depth: int
    chunk_bytes: int

    @classmethod
    def of(cls, hardware: HardwareProfile, decisions: Decisions) -> PriceTable:
        """By what a plan decides."""
        ssd = decisions.weights.ssd
        return cls(hardware, ssd.block_bytes, ssd.queue_depth, decisions.weights.h2d.chunk_bytes)

    @cached_property
    def ssd_gbps(self) -> float:
        return ssd_gbps(self.hardware, self.block_bytes, self.queue_depth)

    def unit(self, nbytes: float, lies: Tier, place: Place) -> Price:
        """One unit of weights in one pass. Its bytes are those that it takes where it stays."""
        taken = {Tier.vram: unit_vram_bytes, Tier.dram: unit_dram_bytes}
        kept = Price(nbytes={lies: taken[lies](round(nbytes))}) if lies in taken else Price()
        return kept + self.brought(nbytes, lies, place) + computed(self.hardware, nbytes, place)

    def expert(self, experts: Experts, lies: Tier, place: Place, chunk_bytes: int) -> Price:
        """One routed expert that a pass asks for, on its way; all that are computed with are in ``Phase.rest``."""
        taken = {Tier.vram: expert_vram_bytes, Tier.dram: expert_dram_bytes}
        kept = Price(nbytes={lies: taken[lies](experts)}) if lies in taken else Price()
        return kept + self.brought(experts.expert_bytes, lies, place, chunk_bytes)

    def kv(self, layer_bytes: int, lies: Tier) -> KvPrice:
        """One layer's KV of all sequences, which attention reads as a whole."""
        home, gpu = Tier.dram if self.hardware.gpu is None else Tier.vram, self.hardware.gpu
        price = KvPrice(Price(nbytes={lies: layer_bytes}))
        if lies is home:
            return price
        price += KvPrice(self.brought(layer_bytes, lies, Place.ring if gpu else Place.host))
        if gpu:
            price += KvPrice(back=self._moved(Resource.d2h, layer_bytes, gpu.d2h.peak))
        if lies is Tier.ssd and self.hardware.ssd_write_gbps:
            price += KvPrice(written=self._moved(Resource.ssd, layer_bytes, self.hardware.ssd_write_gbps))
        return price

    def brought(self, nbytes: float, lies: Tier, place: Place, chunk_bytes: int | None = None) -> Price:
        """``nbytes`` from where they lie to where they are computed with: one unit, or a layer's KV."""
        price = Price()
        if lies is Tier.ssd and place is not Place.card:
            price += self._moved(Resource.ssd, nbytes, self.ssd_gbps)
        if place is Place.ring and self.hardware.gpu:
            price += self._moved(Resource.h2d, nbytes, h2d_gbps(self.hardware.gpu, nbytes, chunk_bytes or self.chunk_bytes))
        return price

    def copied(self, nbytes: float) -> Price:
        """A unit's copy to the card, as far as the link is concerned."""
        return Price({Resource.h2d: self.brought(nbytes, Tier.dram, Place.ring).of(Resource.h2d)})

    def _moved(self, resource: Resource, nbytes: float, gbps: float) -> Price:
        return Price({resource: nbytes / gbps / GB}) + passed(self.hardware, nbytes)


def passed(hardware: HardwareProfile, nbytes: Amount) -> Price:
    """``nbytes`` through the host's memory."""
    return Price({Resource.dram: hardware.bus_s(nbytes)})


def computed(hardware: HardwareProfile, nbytes: float, place: Place) -> Price:
    """Reading ``nbytes`` of weights once to multiply by them."""
    rate = hardware.cpu_matvec_gbps if place is Place.host or hardware.gpu is None else hardware.gpu.memory_gbps
    price = Price({computing(place): nbytes / rate / GB})
    return price + passed(hardware, nbytes) if place is Place.host else price


def home(hardware: HardwareProfile, lies: Tier) -> Place:
    """Who computes with a unit that lies there, as plans have it today."""
    if hardware.gpu is None:
        return Place.host
    return Place.card if lies is Tier.vram else Place.ring
