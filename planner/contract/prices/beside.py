"""The CPU beside the card: when it computes units of a decode step, or missed experts, and what that costs.

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
from penstock.planner.contract.decided.decisions import Decisions, ExpertSlots, MissedExperts, ResidentForms
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.placement import place
from penstock.planner.contract.decided.recording import can_record, launched_because, reads_layers, records_whole
from penstock.planner.contract.experts.expert_misses import Visit, visit
from penstock.planner.contract.experts.expert_slots import kept_in_all
from penstock.planner.contract.experts.host_split import HostSplit
from penstock.planner.contract.experts.shared_visits import NO_VISITS, NONE_CAME, SharedVisits, Unasked, missed_rows, shared_visits
from penstock.planner.contract.experts.visit_waits import mean_of
from penstock.planner.contract.given.formats import Dtype, in_rows
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.given.model import Experts, ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec
from penstock.planner.contract.prices.decoding import unit_s
from penstock.planner.contract.prices.late_experts import ahead_of
from penstock.planner.contract.prices.launches import handed_issue_s
from penstock.planner.contract.prices.price import Amount, Price, Resource
from penstock.planner.contract.prices.price_table import KvPrice, PriceTable, passed
from penstock.planner.contract.prices.sizes import expert_vram_bytes
from penstock.planner.contract.prices.stages import between_experts_s, expert_copy_s, expert_step_s
from penstock.planner.contract.ranks.rank_chain import turns


def host_rows_timed(hardware: HardwareProfile, model: ModelSpec) -> int:
    """The most rows for which the CPU's products with ``model``'s FFN units were timed; 0 where it cannot compute them."""
    if hardware.host is None or hardware.gpu is None or not model.ffn_activation:
        return 0
    rates = hardware.host.computing(model.compute_dtype)
    return min(rates.most_rows(unit.format) for unit in model.of_kind(UnitKind.ffn))


def no_f16_rates(hardware: HardwareProfile, model: ModelSpec) -> bool:
    """Whether ``model`` computes in F16, for which the profile has rates of the CPU beside the card in BF16 alone."""
    return model.compute_dtype is Dtype.float16 and hardware.host is not None and not hardware.host.f16_products


def head_rows_timed(hardware: HardwareProfile, model: ModelSpec) -> int:
    """The same of ``model``'s LM head, tied or not."""
    if hardware.host is None or hardware.gpu is None:
        return 0
    return hardware.host.computing(model.compute_dtype).most_rows(model.lm_head.format)


def rows_timed(hardware: HardwareProfile, model: ModelSpec, host: HostUnits) -> int:
    """The most rows for which the CPU's products with all kinds that ``host`` has units of were timed; with either where it has none."""
    timed = host_rows_timed(hardware, model), head_rows_timed(hardware, model)
    wanted = [rows for rows, count in zip(timed, (host.ffn, host.head), strict=True) if count]
    return min(wanted) if wanted else max(timed)


def no_hand_over(hardware: HardwareProfile, model: ModelSpec) -> str:
    """Why no step of ``model`` hands units to the CPU, wherever they lie; empty where one can. One rank's step does where it is recorded or
    reads layers from the SSD, that of several also where it is launched kernel by kernel for another reason."""
    if not records_whole(model) or (model.dealt is not None and model.dealt.routed):
        return "a step with routed experts is recorded in pieces"
    if model.dealt is None and not can_record(hardware, model):
        return "steps of this model cannot be recorded"
    return ""


def no_host_units(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> str:
    """Why the CPU can compute no FFN unit of a decode step by ``decisions``; empty where it can."""
    lacks = "" if host_rows_timed(hardware, model) else "the CPU has no product with these FFNs"
    if why := _no_units(hardware, model, lacks):
        return why
    placement, outside = place(model, decisions.weights, True), decisions.kv.pages - decisions.kv.vram_pages
    return "" if reads_layers(placement) and not outside else launched_because(placement, outside) or ""


def no_host_head(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> str:
    """The same of blocks of the LM head."""
    lacks = "" if head_rows_timed(hardware, model) else "the CPU has no product with this LM head"
    if why := _no_units(hardware, model, lacks or never_on_host(model)):
        return why
    return launched_because(place(model, decisions.weights, True), decisions.kv.pages - decisions.kv.vram_pages) or ""


def never_on_host(model: ModelSpec) -> str:
    """Why the CPU computes no block of ``model``'s LM head, wherever it lies; empty where it may."""
    return "" if model.dealt is None else "the LM head of several ranks is computed by their cards"


def _no_units(hardware: HardwareProfile, model: ModelSpec, lacks: str) -> str:
    """Why the CPU computes none wherever they lie. ``lacks``: why there would be none on any machine with both rates."""
    if hardware.gpu is None:
        return "there is no GPU"
    if hardware.host is None:
        return "the hardware profile has no rates of the CPU beside the GPU (`planner probe` measures them)"
    if no_f16_rates(hardware, model):
        return "the hardware profile has no rates of the CPU with F16 (`planner probe` measures them)"
    return no_hand_over(hardware, model) or lacks


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


def no_host_attention(hardware: HardwareProfile, model: ModelSpec) -> str:
    """Why the CPU can attend to no layer beside the card; empty where it can."""
    if hardware.gpu is None:
        return "there is no GPU"
    if hardware.host is None or not hardware.host.attention_gbps:
        return "the hardware profile has no rate of attention on the CPU (`planner probe` measures it)"
    if model.dealt is not None:
        return "the CPU attends for one rank alone yet"
    if model.experts is not None:
        return "the CPU's threads are the routed experts'"
    if not model.kv_moves:
        return model.kv_stays_because
    plain = model.compute_dtype is model.kv_dtype is Dtype.bfloat16
    return "" if plain else "the CPU attends to K and V in BF16 alone"


def most_host_rows(hardware: HardwareProfile, model: ModelSpec, batch: int, host: HostUnits) -> int:
    """The most rows for which the CPU's product takes no longer than the unit's copy; ``batch`` at least. ``host`` counts units: of FFNs it
    goes by those, of the LM head's blocks alone by these."""
    assert hardware.host is not None and hardware.gpu is not None
    link, found, rates = hardware.gpu.h2d.peak, batch, hardware.host.computing(model.compute_dtype)
    for form in {unit.format for unit in (model.of_kind(UnitKind.ffn) if host.ffn else (model.lm_head,))}:
        curve = rates.curve(form)
        found = max([found, *(rows for rows, gbps in (curve.points if curve else ()) if gbps >= link)])
    return min(found, rows_timed(hardware, model, host))


GATED = frozenset(
    {"deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"}
)
"""Model types whose experts compute down(act(gate(x)) * up(x)) without biases, as transformers v5 has them."""
CLAMPED = "gpt_oss"
"""Has biases, and a gate of its own; as published its experts are coded."""


def no_split(hardware: HardwareProfile, model: ModelSpec) -> str:
    """Why the CPU can compute no expert beside the card; empty where it can."""
    if hardware.gpu is None:
        return "there is no GPU"
    if hardware.host is None:
        return "the CPU's products beside the GPU were not measured"
    if model.dealt is not None:
        return "the CPU computes experts of one rank alone yet"
    if model.experts is None or model.model_type not in {*GATED, CLAMPED}:
        return "the CPU does not compute this model's experts"
    if no_f16_rates(hardware, model):
        return "the hardware profile has no rates of the CPU with F16 (`planner probe` measures them)"
    unit = model.of_kind(UnitKind.expert)[0]
    if model.model_type == CLAMPED and not unit.is_coded:
        return "its experts lie transposed"
    timed = hardware.host.computing(model.compute_dtype).most_rows(unit.format)
    return "" if timed else f"no rate of the CPU with {unit.format.name} is known (`planner probe` measures it)"


def host_split(hardware: HardwareProfile, model: ModelSpec, slots: ExpertSlots | None, batch: int) -> HostSplit | None:
    """How a step of ``batch`` rows shares missed experts, as ``slots`` decide; None where all are copied."""
    if slots is None or slots.host is MissedExperts.copied or no_split(hardware, model):
        return None
    host, gpu, experts = hardware.host, hardware.gpu, model.experts
    assert host is not None and gpu is not None and experts is not None
    stored, host = model.of_kind(UnitKind.expert)[0].format, host.computing(model.compute_dtype)
    curve = host.curve(stored)
    assert curve is not None, "no_split says so"
    seconds = tuple(experts.expert_bytes / curve.at(rows) / GB for rows in range(1, min(batch, host.most_rows(stored)) + 1))
    copy_s, asked_s = expert_copy_s(gpu, experts, slots.chunk_bytes), handed_issue_s(hardware)
    return HostSplit(copy_s, seconds, host.hop_s, host.beside_h2d, host.h2d_beside, asked_s)


@dataclass(frozen=True)
class Missed:
    """One of a decode step's experts that VRAM misses and DRAM holds."""

    bill: Price
    visits: SharedVisits = NO_VISITS
    """Such as miss 0, 1, 2 ... of them, if nothing goes on beside."""
    all_asked: SharedVisits = NO_VISITS
    """The same of visits that use nearly all experts of a layer: some have come, or come, when the router speaks."""
    copied: float = 1.0
    """The share of them that the link brings."""
    odds: float | None = None
    """Of a layer's experts that a step uses, the share that such a plan misses as ``copied`` is counted for; None where all are copied."""
    link_last: float = 1.0
    """Of a step's visits, the share that waits for the link, not for the CPU."""

    @classmethod
    def of(cls, hardware: HardwareProfile, model: ModelSpec, slots: ExpertSlots, batch: int, kv_bytes: int, copied: Price) -> Missed:
        """Where ``copied`` is the price of a copy. Shared with the CPU, all layers miss as many on average as those of a plan that streams
        nothing but experts and has ``kv_bytes`` of KV in VRAM, each expert by itself: so the price is the same for all decisions of one
        program. The card is spared what the CPU computes with."""
        split, experts, gpu = host_split(hardware, model, slots, batch), model.experts, hardware.gpu
        copy_s = copied.of(Resource.h2d)
        if experts is None or gpu is None:
            return cls(copied)
        one = visit(experts, batch)
        visited = max(1, round(one.touched))
        if split is None:
            came = ahead_of(hardware, model) * one.touched / experts.count
            return cls(copied, SharedVisits.copied(copy_s, visited), SharedVisits.copied(copy_s, visited, came))
        kept = kept_beside_layers(gpu, hardware.vram_bytes - kv_bytes, model, experts) / len(experts.layers)
        rows, odds = missed_rows(experts, batch, round(kept), len(split.host_s)), min(1.0, max(1e-6, one.missed(kept) / visited))
        unasked = _unasked(hardware, model, slots, batch, experts.count - kept)
        ways = shared_visits(split, rows, visited), shared_visits(split, rows, visited, unasked)

        def mean(few: Sequence[float], many: Sequence[float]) -> float:
            """Of a visit."""
            return (1 - one.all_asked) * mean_of(few, odds, one.even) + one.all_asked * mean_of(many, odds, one.even)

        def each(few: Sequence[float], many: Sequence[float]) -> float:
            """Of one missed expert."""
            return mean(few, many) / (odds * visited)

        on_host = each(*(way.taken for way in ways))
        host_s, link_s = each(*(way.host_s for way in ways)), each(*(way.link_s for way in ways))
        seconds = {
            Resource.h2d: link_s + host_s * (1 - split.link_beside) / split.host_beside,
            Resource.cpu: host_s,
            Resource.card: -on_host * expert_step_s(hardware, model, batch),
        }
        bill, link_last = Price(seconds, alongside=host_s) + passed(hardware, experts.expert_bytes), mean(*(way.link_last for way in ways))
        return cls(bill, *ways, 1 - on_host, odds, link_last)


def _unasked(hardware: HardwareProfile, model: ModelSpec, slots: ExpertSlots, batch: int, missing: float) -> Unasked:
    """What comes unasked for a layer of which ``missing`` experts are not kept: as many as the link brings between two layers' experts, and
    one that is on its way. It begins when the layer before has left it a slot. Of one that is not used those pieces go on that the link was
    given, but for half a piece."""
    gpu, experts = hardware.gpu, model.experts
    assert gpu is not None and experts is not None
    copy_s, beside_s = expert_copy_s(gpu, experts, slots.chunk_bytes), between_experts_s(hardware, model, batch)
    copied = min(int(ahead_of(hardware, model)), 1 + int(beside_s / copy_s), int(missing))
    left_s, pieces = max(0.0, copied * copy_s - beside_s), experts.pieces(slots.chunk_bytes)
    return Unasked(copied, missing, left_s, min(left_s, (slots.in_flight - 0.5) / pieces * copy_s)) if copied > 0 else NONE_CAME


def kept_beside_layers(gpu: Gpu, vram_bytes: int, model: ModelSpec, experts: Experts) -> int:
    """Experts of all layers that VRAM keeps beside all that is no expert, as far as there is room."""
    others = sum(model.attn_bytes) + sum(model.ffn_bytes) + model.lm_head_bytes + model.norm_bytes + gpu.context_bytes
    return kept_in_all(experts, max(0, vram_bytes - others) // expert_vram_bytes(experts))


def missed_beside_layers(gpu: Gpu, vram_bytes: int, model: ModelSpec, experts: Experts, one: Visit) -> float:
    """Experts of all layers that such a VRAM misses."""
    return len(experts.layers) * one.missed(kept_beside_layers(gpu, vram_bytes, model, experts) / len(experts.layers))
