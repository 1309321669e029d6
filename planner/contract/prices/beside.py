"""The CPU beside the card: what units of a decode step cost that it computes, and layers that it attends to.

A step with host units takes at least the longest of

    cpu     min((C + D) / c + (1 - c' / c) * (L + K) / l', (C + D) / c') + (H - K) / l
    h2d     (L + H) / l + (1 - l' / l) * (C + D) / c' + E
    chain   card + cpu

The CPU multiplies C bytes, or attends to them: K and V of layers that DRAM holds. The link copies L bytes of layers, H bytes of the LM
head. Each goes at c or l when it is alone, at c' or l' when both are busy. Both start together. The one that ends last is alone at its end.
So a CPU that ends first goes at c' all the time: what the card takes beside a few of its units may be most of a step.
Copies of the LM head find the CPU idle, unless it multiplies by D bytes of that, too: its blocks come behind the last layer, and the next
step's first units behind them. While the CPU is at D the link may copy D * l' / c', of which K are the head's. For the rest it waits: the
ring is taken to be full of what the next step begins with. E are those seconds of the CPU, which is alone, less the slowing of copies that
the middle term counts for them. With a layer's room in the ring plans left more of the head to the CPU, and simulated steps took up to 6 %
longer than predicted.

While the card computes, the CPU's threads read ahead of the next unit's rows. What a core's cache holds of them is no longer waited for:
a unit is sooner done by it, up to what card and hop take between two units at least. So much of the CPU's time lies alongside the card's,
and the chain is shorter by it. It is so of one rank's recorded steps, where the product goes as fast as memory gives its bytes.

A step in which the CPU attends is launched kernel by kernel, too. The card asks for attention by a word, so the interpreter launches ahead
meanwhile: up to all that launching takes beyond the kernels, the chain is shorter by the CPU's seconds.

Where each pass of one rank reads layers from the SSD, its step is launched kernel by kernel: the interpreter launches nothing while it
waits for the CPU, so launches and units follow each other. What CPU, link and drive together move beyond the bus holds up the CPU and
the link for as long as the drive reads: the S bytes that it reads at s add to both rows

    (c' + l' + s - bus) / bus * S / s

Of ranks, C are the bytes of all their units, since one CPU multiplies by them in turn. A rank takes the others to have units in
proportion to layers: of N with as many layers each, N times its own. L and H are those of its own link. The chain is that of all ranks'
cards and the CPU. There the CPU rests while cards compute, and some link copies whenever it works: it takes C / c'. Where c' + N * l' is
more than the host's memory bus carries, both are less by as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import ResidentForms
from penstock.planner.contract.decided.recording import can_record
from penstock.planner.contract.given.formats import in_rows
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec
from penstock.planner.contract.prices.decoding import unit_s
from penstock.planner.contract.prices.price import Amount, Price, Resource
from penstock.planner.contract.prices.price_table import KvPrice, PriceTable, passed
from penstock.planner.contract.ranks.rank_chain import turns

READS_AHEAD = 0.9
"""Of the fastest format's stored bytes a second: from here on memory binds a product, and reading ahead shortens it by what was read. Of an
H200's host, 30 threads, a pause of 150 us: BF16 at 142 GB/s was 122 us sooner done, INT4 at 108 GB/s 22 us."""


@dataclass(frozen=True)
class Beside:
    """Prices of a step of ``rows`` rows in which the CPU computes units; ``forms``: of those that stay in VRAM."""

    hardware: HardwareProfile
    rates: HostRates
    rows: int
    forms: ResidentForms
    turns: float = 1
    """Of several ranks, whose units follow each other, all layers over this one's: each is taken to have as many units of its layers."""
    ranks: float = 1
    """Of several ranks, what all links of a host give over what this one's does."""
    launched: bool = False
    """Whether the interpreter hands units over, not the step's graph: where each pass reads the SSD, and of several ranks whose steps are
    not recorded."""
    between_s: float = 0.0
    """Of the card between two units, at least: the attention of one layer, and what its kernels wait for each other."""

    @classmethod
    def of(cls, hardware: HardwareProfile, model: ModelSpec, rows: int, forms: ResidentForms, reads_ssd: bool = False) -> Beside:
        """Of a machine whose CPU's products are known, and of ``model`` or the layers of it that a rank has. ``reads_ssd``: see
        :func:`reads_layers`."""
        assert hardware.host is not None
        rates = hardware.host.computing(model.compute_dtype)
        if model.dealt is None:
            return cls(hardware, rates, rows, forms, launched=reads_ssd, between_s=_attention_s(hardware, model, rows, forms))
        peaks, own = [card.h2d.peak for card in hardware.round_cards], model.dealt.rank
        ranks = (sum(peaks) / peaks[own] if peaks else model.dealt.count) / hardware.hosts
        one = cls(hardware, rates, rows, forms, turns(model), ranks, not can_record(hardware, model))
        return replace(one, rates=one._on_the_bus(model.of_kind(UnitKind.ffn)))

    @property
    def attends(self) -> Beside:
        """The same of a step in which the CPU attends to layers, and computes no units."""
        return replace(self, rates=self.rates.attending)

    @property
    def _in_turn(self) -> bool:
        """Whether the CPU rests while cards compute, and some link copies whenever it works."""
        return self.turns > 1

    def _on_the_bus(self, units: Sequence[UnitSpec]) -> HostRates:
        """The rates of a rank, whose share of the bus is as the ranks' of its host are, while the CPU multiplies by any of ``units``."""
        gpu, rates = self.hardware.gpu, self.rates
        assert gpu is not None
        c_gbps = max((curve.at(self.rows) for unit in units if (curve := rates.curve(unit.format))), default=0.0)
        asked_gbps = c_gbps * rates.beside_h2d / self.ranks + gpu.h2d.peak * rates.h2d_beside
        share = min(1.0, 1 / max(1e-9, self.hardware.bus_s(asked_gbps * GB)))
        return replace(rates, beside_h2d=rates.beside_h2d * share, h2d_beside=rates.h2d_beside * share)

    def alone_s(self, unit: UnitSpec) -> float:
        """Seconds of the CPU's product with ``unit`` while the link is idle."""
        curve = self.rates.curve(unit.format)
        assert curve is not None
        return unit.stored_bytes / curve.at(self.rows) / GB

    def handed_s(self, unit: UnitSpec) -> float:
        """The same with its way from the card and back, where the interpreter is no faster than a graph."""
        hop_s = self.rates.hop_s
        return self.alone_s(unit) + (max(hop_s, self.rates.attention_hop_s) if self.launched else hop_s)

    def ahead_s(self, unit: UnitSpec) -> float:
        """Seconds of the product with ``unit`` for bytes that threads have read before it is asked for, where they had the time: from
        caches it takes next to none. 0 where threads do not spin before a unit, where arithmetic binds the product, and where numbers of
        a row do not lie side by side."""
        if self.launched or self._in_turn or not self.rates.ahead_bytes or in_rows(unit.format) is not None:
            return 0.0
        if unit.kind is not UnitKind.ffn:  # blocks of the LM head are asked for at once
            return 0.0
        curve = self.rates.curve(unit.format)
        assert curve is not None
        if curve.at(self.rows) < READS_AHEAD * self.rates.peak_gbps:
            return 0.0
        ahead_bytes = self.rates.threads_of((unit.format,)) * self.rates.ahead_bytes
        return min(ahead_bytes, unit.stored_bytes / 2) / curve.at(self.rows) / GB

    def computed(self, unit: UnitSpec) -> Price:
        """``unit`` computed by the CPU and not by the card, beyond its bytes' way through the host's memory, which its copy takes, too; by
        each rank one. The card's seconds are negative: what it would have taken."""
        seen = unit.decoded if unit.kind in self.forms.decoded else unit
        alone_s, slowed_s = self.alone_s(unit), (1 - self.rates.h2d_beside) / self.rates.beside_h2d
        cpu_s = self.handed_s(unit) + (alone_s * (1 / self.rates.beside_h2d - 1) if self._in_turn else 0.0)
        ahead_s = min(self.ahead_s(unit), self.rates.hop_s + self.between_s)
        hidden_s = min(ahead_s, self.rates.hop_s)
        return Price(
            {
                Resource.cpu: self.turns * (cpu_s - hidden_s),
                Resource.h2d: self.turns / self.hardware.hosts * alone_s * slowed_s,
                Resource.card: self.turns * -unit_s(self.hardware, seen, self.rows),
            },
            handing=cpu_s if self.launched else 0,
            alongside=ahead_s - hidden_s,
        )

    @property
    def hop(self) -> Price:
        """From the card to the CPU and back, of one layer that the CPU attends to."""
        return Price({Resource.cpu: self.rates.attention_hop_s})

    def attended(self, layer_bytes: float) -> Price:
        """Attention of one layer of whose K and V the CPU reads ``layer_bytes`` where they lie. The card's seconds are negative: what
        reading them there would have taken."""
        gpu, alone_s = self.hardware.gpu, layer_bytes / self.rates.attention_gbps / GB
        assert gpu is not None
        slowed_s, card_s = alone_s * (1 - self.rates.h2d_beside) / self.rates.beside_h2d, layer_bytes / gpu.memory_gbps / GB
        return Price({Resource.cpu: alone_s, Resource.h2d: slowed_s, Resource.card: -card_s}) + passed(self.hardware, layer_bytes)

    def attending(self, kv: KvPrice, layer: KvPrice, layer_bytes: float, count: int) -> KvPrice:
        """``kv``, of all layers outside VRAM, in a step in which the CPU attends to ``count`` of them. One costs ``layer`` where it
        streams. The copies that are left hold up the CPU."""
        left = kv.read + layer.read * -count
        waits = Price({Resource.cpu: self.held_up(left.of(Resource.h2d), 0.0)})
        return replace(kv, read=left + self.attended(layer_bytes) * count + waits)

    def held_up(self, copies: Amount, head: Amount) -> Amount:
        """Seconds by which ``copies``, seconds of copies alone on the link, hold up the CPU beyond what :meth:`computed` says. ``head``:
        those of them for the LM head while the CPU computes nothing of it."""
        if self._in_turn:
            return 0.0
        share = (1 - self.rates.beside_h2d) / self.rates.h2d_beside
        return copies * share + head * (1 - share)

    def slowed_s(self, unit: UnitSpec) -> float:
        """Seconds by which the CPU takes longer with ``unit`` where copies go on all the time: the most that they hold it up."""
        return self.alone_s(unit) * (1 / self.rates.beside_h2d - 1)

    def meanwhile_s(self, block: UnitSpec) -> float:
        """Seconds of copies alone on the link that go on while the CPU multiplies by a ``block`` of the LM head."""
        return self.alone_s(block) * self.rates.h2d_beside / self.rates.beside_h2d

    @property
    def resting(self) -> float:
        """Seconds in which the link rests for each second of copies that could go on while the CPU is at a block. The CPU is alone then,
        and sooner through; that it slows copies down :meth:`computed` has counted."""
        return max(0.0, self.rates.beside_h2d + self.rates.h2d_beside - 1) / self.rates.h2d_beside

    def crowding(self, units: Iterable[UnitSpec]) -> float:
        """Seconds by which CPU and link are held up for each second of reading the SSD: they and the drive together may move more than the
        host's bus carries while the CPU multiplies by ``units``."""
        gpu, bus_gbps = self.hardware.gpu, self.hardware.dram_bus_gbps
        assert gpu is not None
        c_gbps = max((unit.stored_bytes / GB / self.alone_s(unit) for unit in units), default=0.0)
        asked_gbps = c_gbps * self.rates.beside_h2d + gpu.h2d.peak * self.rates.h2d_beside + self.hardware.ssd_peak_gbps
        return max(0.0, asked_gbps / bus_gbps - 1) if bus_gbps and c_gbps else 0.0

    def bill(self, units: Price, host: Sequence[UnitSpec], head: Price, table: PriceTable) -> Price:
        """Of a step whose units would cost ``units`` if all of ``host`` streamed. ``head``: of that, its LM head's copies."""
        copied_s, head_s, meanwhile_s, slowed_s = units.of(Resource.h2d), head.of(Resource.h2d), 0.0, 0.0
        bill = units
        for unit in host:
            copy = table.copied(unit.stored_bytes)
            copied_s -= copy.of(Resource.h2d)
            bill += copy * -1 + self.computed(unit)
            slowed_s += self.slowed_s(unit)
            if unit.kind is UnitKind.head:
                head_s -= copy.of(Resource.h2d)
                meanwhile_s += self.meanwhile_s(unit)
        idle_s = max(0.0, head_s - meanwhile_s)
        held_up_s = self.held_up(copied_s, idle_s)
        waits = Price({Resource.cpu: min(held_up_s, slowed_s + idle_s) if host else held_up_s})
        if self.launched and not self._in_turn:
            waits += Price(dict.fromkeys((Resource.cpu, Resource.h2d), units.of(Resource.ssd) * self.crowding(host)))
        return bill + waits + Price(rests=max(0.0, meanwhile_s - head_s) * self.resting)


def _attention_s(hardware: HardwareProfile, model: ModelSpec, rows: int, forms: ResidentForms) -> float:
    """Seconds of the card for a layer's attention, of the quickest layer."""
    units = [unit.decoded if unit.kind in forms.decoded else unit for unit in model.of_kind(UnitKind.attn)]
    kernels_s = hardware.gpu.layer_kernels_s if hardware.gpu else 0.0
    return kernels_s + min((unit_s(hardware, unit, rows) for unit in units), default=0.0)
