"""The integer program of one batch and one cache policy, as linear constraints over counts and menu choices.

Bytes are in MB, times in units of one decode step's compute (``tick_s``), so that the solver's tolerances suit models of any size. The
product of a choice and a quantity is one copy of the quantity per choice, zero where the choice is not taken: constraints stay tight. The
few big-M terms carry the largest value that can occur. All layers are taken as equal: in memory each as large as the largest, unless all
are resident; in traffic as the mean. That is exact for uniform models and safe for others.
"""

from __future__ import annotations

from itertools import zip_longest

import pulp

from penstock.planner.contract.bills.cost import objective_weights
from penstock.planner.contract.bills.phase import decode_phase, units_computed
from penstock.planner.contract.bills.reuse import kept_set
from penstock.planner.contract.bills.routed import Streamed
from penstock.planner.contract.decided.decisions import CachePolicy, Tier
from penstock.planner.contract.decided.placement import head_block_bytes, head_blocks
from penstock.planner.contract.decided.recording import can_record, records_whole
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.prices.memory_law import Held, dram_items, ssd_in_place_bytes, ssd_items, staged_experts_bytes, vram_items
from penstock.planner.contract.prices.price import NOTHING, Amount, Place, Price, Resource, computing_of
from penstock.planner.contract.prices.price_table import KvPrice, PriceTable, passed
from penstock.planner.contract.prices.sizes import unit_dram_bytes, unit_vram_bytes
from penstock.planner.contract.prices.stages import decode_compute_s
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.solver.terms.expert_terms import ExpertTerms
from penstock.planner.solver.terms.host_kv_terms import HostKvTerms
from penstock.planner.solver.terms.host_terms import HostTerms, wider
from penstock.planner.solver.terms.kept_terms import KeptTerms
from penstock.planner.solver.terms.kv_terms import KvTerms
from penstock.planner.solver.terms.linear import MB, LinearProgram
from penstock.planner.solver.terms.menu import chunk_menu, pass_menu, ssd_menu
from penstock.planner.solver.terms.page_menu import page_menu
from penstock.planner.solver.terms.problem import Problem
from penstock.planner.solver.terms.ring_terms import RingTerms

CAPACITY_MARGIN_MB = 4096 / MB
"""Kept free of each capacity for the solver's integrality tolerance; a page is also what capacities are really given in."""


class Formulation(LinearProgram):
    """Builds the constraints on construction; ``elastic`` gives each capacity a slack that can be minimised."""

    def __init__(self, problem: Problem, elastic: bool = False):
        super().__init__()
        p = self.problem = problem
        self.elastic = elastic
        self.gpu = p.hardware.gpu
        self.layers = p.model.layers
        self.tick_s = decode_compute_s(p.hardware, p.model, p.workload, p.batch)
        self.ticks_per_s = 1 / self.tick_s
        self.head_blocks = head_blocks(p.model) if self.gpu else 1
        self.block = head_block_bytes(p.model, self.head_blocks)
        self.ssd_choices = ssd_menu(p.hardware, p.model, p.force)
        self.chunk_choices = chunk_menu(p.hardware, p.model, p.force)
        (self.page,) = page_menu(p.hardware, p.model, p.workload, p.force, p.batch)
        kept = kept_set(p.workload, self.page.page_tokens)
        self.pass_choices = pass_menu(p, kept)
        self._choose()
        self._residents()
        self._dram_cache()
        self._tables()
        self._kv()
        self.experts = ExpertTerms(self, p, (self.ssd_bits, self.ssd_choices), self.page.layer_bytes * self.layers, self.ticks_per_s)
        self._times()
        self._capacities()

    def _choose(self) -> None:
        self.ssd_bits = self.bits("ssd", len(self.ssd_choices))
        self.chunk_bits = self.bits("chunk", len(self.chunk_choices))
        self.pass_bits = self.bits("pass", len(self.pass_choices))

    def _residents(self) -> None:
        """Counts in VRAM, which kinds stream at all, and the ring that they stream through."""
        force, n, h = self.problem.force, self.layers, self.head_blocks
        most = n if self.gpu else 0
        self.attn = self.integer("attn", 0, most, force.resident_attn)
        self.ffn = self.integer("ffn", most if self._routers_stay() else 0, most, force.resident_ffn)
        self.head = self.integer("head", 0, h if self.gpu else 0, force.resident_head)
        self.wider = wider(self.problem)
        self.ring = RingTerms(self, self.problem, h, self.block, self.wider)
        for kind, (count, total) in enumerate(((self.attn, n), (self.ffn, n), (self.head, h))):
            streams = self.ring.streams(kind)
            self.add(total - count <= total * streams)
            self.add(total - count >= streams)
        self.attn_heavier = self.integer("attn_heavier", 0, 1)
        self.only_ffn_out = self.integer("only_ffn_out", 0, n)
        self.only_attn_out = self.integer("only_attn_out", 0, n)
        self.add(self.attn - self.ffn == self.only_ffn_out - self.only_attn_out)
        self.add(self.only_ffn_out <= n * self.attn_heavier)
        self.add(self.only_attn_out <= n * (1 - self.attn_heavier))
        self.through_dram = n - self.attn + self.only_ffn_out

    def _routers_stay(self) -> bool:
        """Whether FFN units are too small to stream, since their experts are units of their own: no larger than any measured copy."""
        model = self.problem.model
        return self.gpu is not None and model.experts is not None and model.ffn_max <= self.gpu.h2d.points[0][0]

    def _dram_cache(self) -> None:
        """Slots of the DRAM cache, and the layers that pass through them from SSD."""
        force, n, model = self.problem.force, self.layers, self.problem.model
        self.cap = self.integer("cap", 0, n, force.cap_layers)
        self.headroom = self.integer("headroom", LIMITS.headroom_min, LIMITS.headroom_max)
        hwm = self.cap + self.headroom
        if force.hwm_layers is not None:
            self.add(hwm == force.hwm_layers)
        if force.prefetch_distance is not None:
            self.add(self.cap <= force.prefetch_distance)
            self.add(hwm >= force.prefetch_distance)
        self.all_cached = self.integer("all_cached", 0, 1)
        most = n + LIMITS.headroom_max + 1
        self.add(self.cap <= self.through_dram)
        self.add(hwm >= self.through_dram - n * (1 - self.all_cached))
        self.add(self.through_dram >= hwm + 1 - most * self.all_cached)
        kept = self.cap if self.problem.policy is CachePolicy.pinned else 0
        self.from_ssd = self.integer("from_ssd", 0, n)
        self.add(self.from_ssd >= self.through_dram - kept - n * self.all_cached)
        self.add(self.from_ssd <= n * (1 - self.all_cached))
        self.ssd_only_ffn = self.integer("ssd_only_ffn", 0, n)
        self.ssd_only_attn = self.integer("ssd_only_attn", 0, n)
        self.add(self.ssd_only_ffn <= self.only_ffn_out)
        self.add(self.ssd_only_attn <= self.only_attn_out)
        self.add(self.ssd_only_ffn + self.ssd_only_attn <= self.from_ssd)
        self.spare_slots = self.amount("spare_slots", LIMITS.headroom_spare)
        self.add(self.spare_slots <= self.headroom - LIMITS.headroom_min)
        self.add(self.spare_slots <= LIMITS.headroom_spare * (1 - self.all_cached))
        self.layer_cache: Amount = 0
        slots = []
        for attn, ffn in ((0, 1), (1, 0), (1, 1)):
            chosen = self.ring.both(attn, ffn)
            count = self.amount(f"cache_slots_{attn}{ffn}", n)
            self.add(count <= n * chosen)
            slots.append(count)
            slot = (attn and unit_dram_bytes(model.attn_max)) + (ffn and unit_dram_bytes(model.ffn_max))
            self.layer_cache += count * slot
        self.add(pulp.lpSum(slots) >= hwm - most * self.all_cached)
        self.add(pulp.lpSum(slots) >= self.through_dram - n * (1 - self.all_cached))

    def _tables(self) -> None:
        """The embedding table and the LM head, tied or not, in VRAM and DRAM."""
        model, force = self.problem.model, self.problem.force
        forced = None if force.embedding is None else int(force.embedding is Tier.vram)
        self.embed_in_vram = self.integer("embed_in_vram", 0, 1 if self.gpu else 0, forced)
        if not model.computes_embedding:
            self.add(self.embed_in_vram <= 0)
        embed, head_streams = model.embed_bytes, self.ring.streams(2)
        if model.tied:
            in_vram, in_dram = self.amount("tied_vram", 1), self.amount("tied_dram", 1)
            self.add(in_vram >= self.embed_in_vram + head_streams - 1)
            self.add(in_dram >= head_streams)
            self.add(in_dram >= 1 - self.embed_in_vram)
            self.embedding, self.tables = embed * in_vram, embed * in_dram
        else:
            no_head = self.integer("no_head_in_vram", 0, 1)
            self.add(self.head <= self.head_blocks * (1 - no_head))
            rounding = self.head_blocks * self.block - model.head_bytes
            self.embedding = embed * self.embed_in_vram
            self.tables = embed * (1 - self.embed_in_vram) + (self.head_blocks - self.head) * self.block - rounding * no_head

    def _kv(self) -> None:
        """The KV of running sequences, and of prompts to come."""
        self.kv = KvTerms(self, self.problem, self.page)
        self.ssd_busy: pulp.LpVariable | pulp.LpAffineExpression = 1 - self.all_cached
        if self.problem.workload.kv_spill:
            self.ssd_busy = self.kv.spill(self.all_cached)
        self.kept = KeptTerms(self, self.problem, self.page, (self.ssd_bits, self.ssd_choices), self.ticks_per_s)
        if self.problem.workload.kv_spill and self.kept.set.pages:
            on_ssd = self.integer("kv_on_ssd", 0, 1)
            self.add(self.kv.layers[Tier.ssd] <= self.layers * on_ssd)
            self.add(self.kept.pages <= self.kept.set.pages * (1 - on_ssd))

    def _times(self) -> None:
        """Ticks of both phases: at least those of every resource, by the bills that predictions are made of."""
        p, ticks = self.problem, self.ticks_per_s
        (units, most_units), (kv, most_kv) = self._units(), self._kv_moved()
        far = (1 - self.embed_in_vram) if self.gpu else 0
        self.each_pass = units + self.experts.each_pass(p.batch)
        self.decode_t = self.amount("decode_t")
        step_phase = decode_phase(p.hardware, p.model, p.workload, p.batch, self.head_blocks, p.forms)
        phase = step_phase.in_units_of(self.tick_s)
        streamed = {
            UnitKind.attn: self.layers - self.attn,
            UnitKind.ffn: self.layers - self.ffn,
            UnitKind.head: self.head_blocks - self.head,
        }
        launched = self._launched()
        kept = streamed | {UnitKind.ffn: streamed[UnitKind.ffn] - self.from_ssd}
        self.host = HostTerms(self, p, kept, self._interrupted(launched), launched, self.ticks_per_s)
        self.host.keep_slots(self.ring)
        if self.wider:
            self.host.widen_ring(self.ring, self.attn + self.ffn + self.head, 2 * self.layers + self.head_blocks)
        self.attention = HostKvTerms(self, p, self.kv.layers[Tier.dram], self.page.layer_bytes, self.ticks_per_s)
        of_step = self.host.streamed(streamed)
        kv_of_step = self._step_kv(kv)
        step = phase.bill(self._step_units(units, most_units) + self.experts.each_step(), kv_of_step, far, of_step, launched)
        step += self.attention.launched_ahead(phase) if self.attention.most else NOTHING
        self._lasts(self.decode_t, step)
        self.ring.lasts(self.decode_t, step_phase, step, of_step, ticks)
        streamed_t = units.of(Resource.h2d) + phase.kv_read * kv_of_step.read.of(Resource.h2d)
        moving = Streamed(streamed_t, self.step_head_t, self._ahead_t)
        for routed_t in self.experts.routed_t(step.of(computing_of(p.hardware)), moving, launched):
            self.add(self.decode_t >= routed_t)
        self.prefill_t = self.amount("prefill_t")
        passes_t = self.prefill_t - self.kept.restore_t
        if self.kept.set.prefix_pages:
            found = pulp.lpSum(bit * c.kept_pages for bit, c in zip(self.pass_bits, self.pass_choices, strict=True))
            self.add(self.kept.pages == found)
        for bit, choice in zip(self.pass_bits, self.pass_choices, strict=True):
            if choice.recorded_tokens:  # recorded kernels read weights where they stay, and K and V beside them
                self.add(bit <= 1 - self.ring.busy)
                self.add(self.kv.layers[Tier.dram] + self.kv.layers[Tier.ssd] <= self.layers * (1 - bit))
            phase = choice.phase.in_units_of(self.tick_s)
            bill = phase.bill(units + self.experts.each_pass(phase.rows, phase.late), kv, far, streamed)
            all_stream = {kind: self.head_blocks if kind is UnitKind.head else self.layers for kind in streamed}
            most = phase.bill(most_units + self.experts.most(phase.rows, phase.late), most_kv, 1, all_stream)
            self._lasts(passes_t, bill, bit, most)
            self.ring.lasts(passes_t, choice.phase, bill, streamed, ticks, bit, most)
        prefill_weight, decode_weight = objective_weights(p.workload, p.batch, self.pass_choices[0].chunk_tokens)
        pass_t = p.hardware.pass_s * ticks
        passes = pulp.lpSum(bit * c.phase.passes for bit, c in zip(self.pass_bits, self.pass_choices, strict=True))
        self.whole_prefill_t, self.whole_step_t = self.prefill_t + passes * pass_t, self.decode_t + pass_t
        self.total_t = prefill_weight * self.whole_prefill_t + decode_weight * self.whole_step_t

    def _step_units(self, units: Price, most_units: Price) -> Price:
        """``units``, ``most_units`` at most, as a decode step pays them: the CPU computes some that stream in other passes, or attends
        beside their copies."""
        model, beside = self.problem.model, self.host.most or self.attention.most
        head_t = self.step_head_t = self._head_copies() if self.gpu and (beside or model.experts) else 0
        if not beside:
            return units
        copies_t = self.amount("step_h2d_t")
        mean, on_host = sum(model.ffn_bytes) / self.layers / model.ffn_max * self.ticks_per_s, self.host.count
        for bit, choice, (all_t, most_t) in zip(self.chunk_bits, self.chunk_choices, self.copies, strict=True):
            table = PriceTable(self.problem.hardware, 1, 1, choice.chunk_bytes)
            each_t = table.copied(model.ffn_max).of(Resource.h2d) * mean
            block_t = table.copied(self.block).of(Resource.h2d) * self.ticks_per_s
            spared_t = on_host[UnitKind.ffn] * each_t + on_host[UnitKind.head] * block_t
            self.add(copies_t >= all_t - spared_t - most_t * (1 - bit))
        most_t = max(most_t for _, most_t in self.copies)
        step = units.without(Resource.h2d) + Price({Resource.h2d: copies_t})
        reads_t, most_reads_t = units.of(Resource.ssd), most_units.of(Resource.ssd)
        step += self.host.step(copies_t, head_t, most_t, reads_t, most_reads_t) if self.host.most else NOTHING
        return self.attention.step(step, copies_t, head_t, most_t) if self.attention.most else step

    @property
    def _ahead_t(self) -> float:
        """Ticks to copy the attention units of which the largest ring has room beyond the one that computes."""
        if not self.gpu:
            return 0.0
        slots, forced = self.ring.most_slots, self.problem.force.vram_prefetch_distance
        ahead = max(0, slots - LIMITS.ring_margin) if forced is None else forced
        tables = (PriceTable(self.problem.hardware, 1, 1, choice.chunk_bytes) for choice in self.chunk_choices)
        return ahead * self.ticks_per_s * max(table.copied(self.problem.model.attn_max).of(Resource.h2d) for table in tables)

    def _head_copies(self) -> Amount:
        """Ticks that a step's copies of the LM head take, at the chunk that is chosen: no less, and no more where the CPU may compute some
        of it, beside which they are."""
        head_t, on_host = self.amount("step_head_t"), self.host.count[UnitKind.head]
        tables = [PriceTable(self.problem.hardware, 1, 1, choice.chunk_bytes) for choice in self.chunk_choices]
        each_t = [table.copied(self.block).of(Resource.h2d) * self.ticks_per_s for table in tables]
        copied = self.head_blocks - self.head - on_host
        for bit, block_t in zip(self.chunk_bits, each_t, strict=True):
            self.add(head_t >= copied * block_t - self.head_blocks * block_t * (1 - bit))
            if self.host.most_blocks:
                self.add(head_t <= copied * block_t + self.head_blocks * max(each_t) * (1 - bit))
        return head_t

    def _step_kv(self, kv: KvPrice) -> KvPrice:
        """``kv`` as a decode step pays it: the CPU attends to some layers that stream in other passes."""
        if not self.attention.most:
            return kv
        tables = (PriceTable(self.problem.hardware, 1, 1, choice.chunk_bytes) for choice in self.chunk_choices)
        each_t = [table.kv(self.page.layer_bytes, Tier.dram).read.of(Resource.h2d) * self.ticks_per_s for table in tables]
        outside = self.kv.layers[Tier.dram] + self.kv.layers[Tier.ssd]
        return self.attention.kv(kv, outside, list(zip(self.chunk_bits, each_t, strict=True)))

    def _launched(self) -> Amount:
        """1 where a decode step is launched kernel after kernel, by :func:`launched_because`."""
        if not can_record(self.problem.hardware, self.problem.model):
            return 1
        whole = records_whole(self.problem.model)
        if whole and not self.problem.workload.kv_spill:
            return 1 - self.all_cached
        launched = self.integer("launched", 0, 1)
        self.add(launched >= 1 - self.all_cached)
        if not whole:
            outside = 2 * self.layers - self.attn - self.ffn + self.head_blocks - self.head
            self.add(outside <= (2 * self.layers + self.head_blocks) * launched)
        if not self.problem.workload.kv_spill:
            return launched
        self.add(self.kv.layers[Tier.dram] + self.kv.layers[Tier.ssd] <= self.layers * launched)
        return launched

    def _interrupted(self, launched: Amount) -> Amount:
        """1 where no unit is handed to the CPU: KV lies outside VRAM, or, of several ranks, each pass reads the SSD. ``launched``: see
        :meth:`_launched`."""
        dealt, spills = self.problem.model.dealt is not None, self.problem.workload.kv_spill
        if not dealt:
            return launched if spills else 0
        if not spills:
            return 1 - self.all_cached
        interrupted = self.integer("interrupted", 0, 1)
        self.add(interrupted >= 1 - self.all_cached)
        self.add(self.kv.layers[Tier.dram] + self.kv.layers[Tier.ssd] <= self.layers * interrupted)
        return interrupted

    def _lasts(self, phase_t: Amount, bill: Price, bit: pulp.LpVariable | int = 1, most: Price = NOTHING) -> None:
        """``phase_t`` is no less than ``bill`` where ``bit`` is 1; ``most`` is what the bill can be.

        A bus that carries all that uses it, each at its best rate, is never the slowest and needs no constraint.
        """
        h, m, spills = self.problem.hardware, self.problem.model, self.problem.workload.kv_spill
        back = h.ssd_write_gbps + (self.gpu.d2h.peak if self.gpu else 0) if spills else 0
        beside = h.host.computing(m.compute_dtype).peak_gbps if h.host and (self.host.most or m.experts) else 0
        beside = max(beside, h.host.attention_gbps if h.host and self.attention.most else 0)
        may_bind = h.bus_may_bind(h.ssd_peak_gbps, self.gpu.h2d.peak if self.gpu else h.cpu_matvec_gbps, back, beside)
        idle = () if may_bind else (Resource.dram,)
        for least, high in zip_longest(bill.without(*idle).least(), most.without(*idle).least(), fillvalue=0.0):
            if not isinstance(least, int | float) or least > 0:
                self.add(phase_t >= least - high * (1 - bit))

    def _units(self) -> tuple[Price, Price]:
        """All units of weights once, and the most that they can be. A unit is as large as the mean of its kind, and copied at the rate of
        the largest."""
        p, n, ticks = self.problem, self.layers, self.ticks_per_s
        attn, ffn = sum(p.model.attn_bytes) / n, sum(p.model.ffn_bytes) / n
        read = self.from_ssd * (attn / MB + ffn / MB) - self.ssd_only_ffn * (attn / MB) - self.ssd_only_attn * (ffn / MB)
        most_read = n * (attn + ffn) / MB
        units = Price({Resource.ssd: self._by_read("weights", read, most_read)})
        most = Price({Resource.ssd: most_read * MB * max(self._read_t)})
        moved, most_moved = read, most_read
        self.copies: list[tuple[Amount, float]] = []
        if self.gpu:
            kinds = (attn, p.model.attn_max, n, self.attn), (ffn, p.model.ffn_max, n, self.ffn)
            copied = [*kinds, (self.block, self.block, self.head_blocks, self.head)]
            copies_t = self.amount("h2d_t")
            for bit, choice in zip(self.chunk_bits, self.chunk_choices, strict=True):
                table = PriceTable(p.hardware, 1, 1, choice.chunk_bytes)
                each = [table.copied(large).of(Resource.h2d) * ticks * (size / max(1, large)) for size, large, *_ in copied]
                most_t = sum(t * count for t, (_, _, count, _) in zip(each, copied, strict=True))
                all_t = pulp.lpSum((count - stays) * t for t, (_, _, count, stays) in zip(each, copied, strict=True))
                self.copies.append((all_t, most_t))
                self.add(copies_t >= all_t - most_t * (1 - bit))
            units += Price({Resource.h2d: copies_t})
            most += Price({Resource.h2d: max(most_t for _, most_t in self.copies)})
            moved += pulp.lpSum((count - stays) * (size / MB) for size, _, count, stays in copied)
            most_moved += sum(size * count for size, _, count, _ in copied) / MB
        computed = units_computed(p.hardware, p.model, self.head_blocks) * ticks
        return units + self._passed(moved) + computed, most + self._passed(most_moved) + computed

    def _kv_moved(self) -> tuple[KvPrice, KvPrice]:
        """All KV outside the device once, and the most that it can be."""
        p, layer, ticks = self.problem, self.page.layer_bytes, self.ticks_per_s
        if not p.workload.kv_spill:
            return KvPrice(), KvPrice()
        on_ssd, outside = self.kv.mb(Tier.ssd), self.kv.spilled_mb()
        most_mb = self.layers * layer / MB
        read, most = Price({Resource.ssd: self._by_read("kv", on_ssd, most_mb)}), Price({Resource.ssd: most_mb * MB * max(self._read_t)})
        back = most_back = Price()
        if self.gpu:
            copies_t, most_t = self.amount("kv_h2d_t"), []
            for bit, choice in zip(self.chunk_bits, self.chunk_choices, strict=True):
                each = PriceTable(p.hardware, 1, 1, choice.chunk_bytes).kv(layer, Tier.dram).read.of(Resource.h2d) * ticks
                most_t.append(self.layers * each)
                self.add(copies_t >= (self.kv.layers[Tier.dram] + self.kv.layers[Tier.ssd]) * each - most_t[-1] * (1 - bit))
            read, most = read + Price({Resource.h2d: copies_t}), most + Price({Resource.h2d: max(most_t)})
            each_t = PriceTable(p.hardware, 1, 1, 1).kv(MB, Tier.dram).back.of(Resource.d2h) * ticks
            back, most_back = Price({Resource.d2h: outside * each_t}), Price({Resource.d2h: most_mb * each_t})
        write_t = PriceTable(p.hardware, 1, 1, 1).kv(MB, Tier.ssd).written.of(Resource.ssd) * ticks
        written, most_written = Price({Resource.ssd: on_ssd * write_t}), Price({Resource.ssd: most_mb * write_t})
        return (
            KvPrice(read + self._passed(on_ssd + outside), back + self._passed(outside), written + self._passed(on_ssd)),
            KvPrice(most + self._passed(2 * most_mb), most_back + self._passed(most_mb), most_written + self._passed(most_mb)),
        )

    @property
    def _read_t(self) -> list[float]:
        """Ticks to read a byte, at each choice of block and depth."""
        tables = (PriceTable(self.problem.hardware, c.block_bytes, c.queue_depth, 1) for c in self.ssd_choices)
        return [table.brought(1, Tier.ssd, Place.host).of(Resource.ssd) * self.ticks_per_s for table in tables]

    def _by_read(self, name: str, mb: Amount, most_mb: float) -> Amount:
        """Ticks to read ``mb`` at the chosen block and depth."""
        return self.weighted(f"ssd_{name}_mb", self.ssd_bits, mb, most_mb, [t * MB for t in self._read_t])

    def _passed(self, mb: Amount) -> Price:
        """``mb`` through the host's memory."""
        return passed(self.problem.hardware, mb * (MB * self.ticks_per_s))

    def _capacities(self) -> None:
        """The three capacities, by the memory law. Slacks are in MB."""
        p, held = self.problem, self._held()
        self.vram_mb = pulp.lpSum(vram_items(p.hardware, p.model, p.workload, held).values()) / MB
        self.dram_mb = pulp.lpSum(dram_items(p.hardware, p.model, p.workload, held).values()) / MB
        self.ssd_mb = (pulp.lpSum(ssd_items(p.model, held).values()) - ssd_in_place_bytes(p.model)) / MB
        self.slack = {t: self.amount(f"slack_{t}", None if self.elastic else 0) for t in Tier}
        limits = [(Tier.dram, self.dram_mb, p.hardware.dram_bytes), (Tier.ssd, self.ssd_mb, p.hardware.ssd_bytes)]
        if self.gpu:
            limits.insert(0, (Tier.vram, self.vram_mb, p.hardware.vram_bytes))
        for tier, used, capacity in limits:
            self.add(used <= max(0.0, capacity / MB - CAPACITY_MARGIN_MB) + self.slack[tier])

    def _held(self) -> Held:
        """What takes bytes, by the program's variables. Units of a kind are as large as the largest, unless all of them stay."""
        model, layer = self.problem.model, self.page.layer_bytes
        residents = self.head * unit_vram_bytes(self.block)
        stay = model.decoded(self.problem.forms.decoded)
        for kind, (count, sizes) in enumerate(((self.attn, stay.attn_bytes), (self.ffn, stay.ffn_bytes))):
            largest, taken = unit_vram_bytes(max(sizes)), sum(map(unit_vram_bytes, sizes))
            residents += count * largest - (1 - self.ring.streams(kind)) * (self.layers * largest - taken)
        return Held(
            residents=residents,
            ring=self.ring.nbytes,
            embedding=self.embedding,
            layer_cache=self.layer_cache,
            staging=pulp.lpSum(bit * c.staging_bytes for bit, c in zip(self.ssd_bits, self.ssd_choices, strict=True)),
            tables=self.tables,
            expert_slots=self.experts.slots,
            kv={tier: layers * layer for tier, layers in self.kv.layers.items()},
            states=self.problem.batch * model.state_bytes,
            kv_passing={tier: slots * layer for tier, slots in self.kv.passing.items()},
            kept_pages=self.kept.tiers,
            kept_page_bytes=self.kept.page_bytes,
            bounces=self.kept.bounces,
            kept_files=self.kept.files,
            activations=pulp.lpSum(bit * c.activation_bytes for bit, c in zip(self.pass_bits, self.pass_choices, strict=True)),
            staged=staged_experts_bytes(self.problem.hardware, model, self.problem.batch),
        )
