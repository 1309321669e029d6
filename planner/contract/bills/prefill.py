"""What a plan's decisions move, as a bill, and the prefill of one batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.planner.contract.bills.phase import Phase, decode_phase, prefill_phase
from penstock.planner.contract.bills.ring_slots import OneFfnSlot
from penstock.planner.contract.decided.decisions import Decisions, Tier
from penstock.planner.contract.decided.placement import place
from penstock.planner.contract.decided.recording import reads_layers
from penstock.planner.contract.experts.expert_misses import Misses, missed_at_first, misses
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.late_experts import LateExperts
from penstock.planner.contract.prices.launches import is_recorded
from penstock.planner.contract.prices.missed_experts import Missed
from penstock.planner.contract.prices.price import Place, Price, Resource, total
from penstock.planner.contract.prices.price_table import KvPrice, PriceTable, home
from penstock.planner.contract.prices.sizes import kv_layer_bytes
from penstock.planner.contract.prices.stages import late_read_s, prefill_passes, table_is_far


@dataclass(frozen=True)
class Moved:
    """Prices of what decisions move."""

    units: Price
    """All units of weights in one pass, routed experts apart; units that the CPU computes in decode steps stream."""
    step: Price
    """The same in a decode step."""
    head: Price
    """Of that, copies of the LM head."""
    kv: KvPrice
    """All KV that lies outside the device, at its sequences' end."""
    step_kv: KvPrice
    """The same in a decode step: the CPU attends to some of it where it lies."""
    attended_s: float
    """Seconds of the CPU for that."""
    kv_ssd_bytes: int
    kv_h2d_bytes: int
    """0 without a GPU."""
    step_kv_h2d_bytes: int
    """The same in a decode step."""
    expert_read: Price
    """One routed expert from the SSD."""
    read_late_s: float
    """A layer's visit that reads any takes so many seconds longer than they are in transit."""
    expert_copied: Price
    """One from DRAM to the card; nothing without one."""
    last_piece: float
    """Of that, the share of its last piece."""
    missed: Missed
    """One that a decode step misses in VRAM and not in DRAM."""
    ahead: Price
    """Copies of units of which the ring has room for so many beyond the one that computes."""
    streamed: Mapping[UnitKind, int]
    """Units that do not stay where they are computed with."""
    step_streamed: Mapping[UnitKind, int]
    """The same in a decode step."""
    step_bytes: int
    """Of these: what a decode step copies."""
    recorded: bool
    """Whether decode steps are."""
    one_ffn_slot: bool
    """Whether the ring has one for all FFN units and blocks of the LM head."""

    @classmethod
    def of(cls, hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> Moved:
        """By ``decisions``."""
        gpu, kv, table = hardware.gpu, decisions.kv, PriceTable.of(hardware, decisions)
        placement = place(model, decisions.weights, gpu is not None)
        layer = kv_layer_bytes(model, kv)
        pages = {Tier.dram: kv.dram_pages, Tier.ssd: kv.ssd_pages}
        layers = {tier: n * model.layers / max(1, kv.pages) for tier, n in pages.items()}
        kv_price = KvPrice()
        for tier, count in layers.items():
            if count:
                kv_price += table.kv(layer, tier) * count
        units = total(table.unit(nbytes, lies, home(hardware, lies)) * count for (nbytes, lies), count in placement.alike.items())
        read, copied, missed, pieces = Price(), Price(), Missed(Price()), 1
        if model.experts and decisions.experts:
            nbytes, chunk = model.experts.expert_bytes, decisions.experts.chunk_bytes
            read = table.brought(nbytes, Tier.ssd, Place.host)
            copied = table.brought(nbytes, Tier.dram, Place.ring, chunk)
            pieces = model.experts.pieces(chunk)
            missed = Missed.of(hardware, model, decisions.experts, decisions.batch, layer * model.layers, copied)
        outside = round(sum(layers.values()) * layer) if gpu else 0
        head = table.copied(placement.head_block_bytes) * placement.head.count(Tier.dram) if gpu else Price()
        step, host = units, placement.host_units if decisions.weights.host.compute(decisions.batch) else ()
        attended_s, step_kv, on_host = 0.0, kv_price, min(round(layers[Tier.dram]), kv.host_layers) if gpu and hardware.host else 0
        if host or on_host:
            beside = Beside.of(hardware, model, decisions.batch, decisions.weights.forms, reads_layers(placement))
            beside = beside.attends if on_host else beside
            step = beside.bill(units, [placement.part(unit) for unit in host], head, table)
        if on_host:
            step += beside.hop * on_host
            step_kv = beside.attending(kv_price, table.kv(layer, Tier.dram), layer, on_host)
            attended_s = on_host * beside.attended(layer).of(Resource.cpu)
        coming = placement.step_units if host else placement.streamed_units
        streamed, step_streamed = (Counter(UnitKind(unit.kind) for unit in these) for these in (placement.streamed_units, coming))
        return cls(
            units=units,
            step=step,
            head=head,
            kv=kv_price,
            step_kv=step_kv,
            attended_s=attended_s,
            kv_ssd_bytes=round(layers[Tier.ssd] * layer),
            kv_h2d_bytes=outside,
            step_kv_h2d_bytes=outside - on_host * layer,
            expert_read=read,
            read_late_s=late_read_s(hardware, model, decisions.weights.ssd.block_bytes, decisions.weights.ssd.queue_depth),
            expert_copied=copied,
            last_piece=1 / pieces,
            missed=missed,
            ahead=table.copied(model.attn_max) * decisions.weights.vram.prefetch_distance if gpu else Price(),
            streamed=streamed,
            step_streamed=step_streamed,
            step_bytes=sum(map(placement.unit_bytes, coming)),
            recorded=is_recorded(hardware, placement, kv),
            one_ffn_slot=placement.ring_classes.get("ffn", (0, 0))[0] == 1,
        )

    def each_pass(self, units: Price, missed: Misses, late: LateExperts) -> Price:
        """Of a pass over ``units`` that misses so many experts."""
        moved = units + self.expert_read * missed.dram + self.expert_copied * missed.vram
        copy_s, read_s = self.expert_copied.of(Resource.h2d), self.expert_read.of(Resource.ssd)
        return moved + (late.copied(missed.vram, copy_s) if copy_s else late.brought(missed.dram * read_s, read_s))

    def each_step(self, missed: Misses) -> Price:
        """The same of a decode step."""
        return self.step + (self.expert_read + self.expert_copied) * missed.dram + self.missed.bill * missed.from_dram


@dataclass(frozen=True)
class Prefill:
    """The prefill of one batch by ``decisions``, from any token on: the KV of what lies before is there already.

    The tokens that are left attend to all before them, and take a pass over the streamed weights at least, however few they are.
    """

    hardware: HardwareProfile
    model: ModelSpec
    workload: Workload
    decisions: Decisions

    @cached_property
    def moved(self) -> Moved:
        return Moved.of(self.hardware, self.model, self.decisions)

    def bill(self, start: int = 0) -> Price:
        """When the prompts' first ``start`` tokens need not be computed. Kept for the next time."""
        if start not in self._bills:
            self._bills[start] = self._billed(start)
        return self._bills[start]

    @cached_property
    def _bills(self) -> dict[int, Price]:
        return {}

    def _billed(self, start: int) -> Price:
        phase = self._phase(start)
        return self._bill(
            phase, self.moved.each_pass(self.moved.units, self._missed(phase), phase.late), self.moved.kv, self.moved.streamed
        )

    def _phase(self, start: int) -> Phase:
        d = self.decisions
        blocks, chunk = d.weights.head_blocks, d.prefill_chunk_tokens
        parts, recorded = d.prefill_part_tokens, d.recorded_prompt_tokens
        return prefill_phase(self.hardware, self.model, self.workload, d.batch, blocks, chunk, start, d.weights.forms, parts, recorded)

    def step(self) -> Price:
        """Of one decode step behind it, as if its experts were known before their routers."""
        d = self.decisions
        phase = decode_phase(self.hardware, self.model, self.workload, d.batch, d.weights.head_blocks, d.weights.forms)
        bill = self._bill(phase, self.moved.each_step(self._missed(phase)), self.moved.step_kv, self.moved.step_streamed)
        return bill + Price(alongside=min(phase.launches.of(Resource.card), phase.kv_read * self.moved.attended_s))

    def seconds(self, start: int = 0) -> float:
        """Of the slowest resource, and of what no resource explains in each pass."""
        return self.bill(start).lasts() + self._passes_s(start)

    def first_seconds(self, start: int, ssd_s: float, h2d_s: float) -> float:
        """The same of a batch that need not wait for so much of reading and of copying: all slots are full when it begins. Both tiers then
        hold more different experts than behind decode steps."""
        saved = self.moved.expert_read * -self._read_less(start) + Price({Resource.ssd: -ssd_s, Resource.h2d: -h2d_s})
        return (self.bill(start) + saved).lasts() + self._passes_s(start)

    def _read_less(self, start: int) -> float:
        """Experts that the first batch's passes find, and a later one's do not."""
        if self.model.experts is None:
            return 0.0
        phase, gpu = self._phase(start), self.hardware.gpu is not None
        first = missed_at_first(self.model, self.decisions.experts, phase.rows, gpu)
        return phase.passes * max(0.0, self._missed(phase).dram - first)

    def _missed(self, phase: Phase) -> Misses:
        return misses(self.model, self.decisions.experts, phase.rows, self.hardware.gpu is not None)

    def _bill(self, phase: Phase, each_pass: Price, kv: KvPrice, streamed: Mapping[UnitKind, int]) -> Price:
        launched = int(not self.moved.recorded)
        bill = phase.bill(each_pass, kv, table_is_far(self.hardware, self.decisions), streamed, launched)
        if not self.moved.one_ffn_slot:
            return bill
        one = OneFfnSlot.of(self.hardware, self.model, phase, self.decisions.weights.head_blocks)
        return bill + Price(behind=max(0.0, one.held(streamed)), rests=max(0.0, *one.rests(streamed))) * phase.passes

    def _passes_s(self, start: int) -> float:
        return prefill_passes(self.workload, self.decisions.prefill_chunk_tokens, start) * self.hardware.pass_s
