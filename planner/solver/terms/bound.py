"""A quick lower bound on a problem's objective: every byte of memory used, and every link at its best rate."""

from __future__ import annotations

import math

from penstock.planner.common.measures import GB
from penstock.planner.contract.bills.cost import objective_weights, with_wait
from penstock.planner.contract.bills.phase import decode_phase, units_computed
from penstock.planner.contract.bills.reuse import kept_set
from penstock.planner.contract.decided.decisions import MissedExperts, Tier
from penstock.planner.contract.decided.placement import head_block, head_blocks
from penstock.planner.contract.experts.expert_misses import visit
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.memory_law import Held, dram_items, vram_items
from penstock.planner.contract.prices.price import NOTHING, Place, Price, Resource
from penstock.planner.contract.prices.price_table import KvPrice, PriceTable
from penstock.planner.contract.prices.stages import expert_step_s
from penstock.planner.contract.ranks.rank_chain import fetching_turns
from penstock.planner.solver.terms.host_kv_terms import most_attended
from penstock.planner.solver.terms.host_terms import most_host_blocks, most_host_units
from penstock.planner.solver.terms.menu import chunk_menu, pass_menu, ssd_menu
from penstock.planner.solver.terms.page_menu import page_menu
from penstock.planner.solver.terms.problem import Problem


def bound_s(problem: Problem) -> float:
    """No plan for ``problem`` is faster; infinite when it cannot fit. Takes no solve."""
    p, model, hardware = problem, problem.model, problem.hardware
    (page,) = page_menu(hardware, model, p.workload, p.force, p.batch)
    passes = pass_menu(p, kept_set(p.workload, page.page_tokens))
    lies = Tier.vram if hardware.gpu else Tier.dram
    kv = {} if p.workload.kv_spill else {lies: model.layers * page.layer_bytes}
    held = Held(kv=kv, activations=min(c.activation_bytes for c in passes))
    dram = hardware.dram_bytes - sum(dram_items(hardware, model, p.workload, held).values())
    vram = hardware.vram_bytes - sum(vram_items(hardware, model, p.workload, held).values()) if hardware.gpu else 0
    if min(vram, dram) < 0:
        return math.inf
    blocks = head_blocks(model) if hardware.gpu else 1
    reading = max(ssd_menu(hardware, model, p.force), key=lambda c: c.gbps)
    table = PriceTable(hardware, reading.block_bytes, reading.queue_depth, 1)
    layers = sum(model.attn_bytes) + sum(model.ffn_bytes)
    stays = vram * _stored_share(p)
    units = units_computed(hardware, model, blocks) + table.brought(max(0, layers - stays - dram), Tier.ssd, Place.host)
    copied = NOTHING
    if hardware.gpu:
        s_per_gb = min(min(c.s_per_gb) for c in chunk_menu(hardware, model, p.force))
        copied = Price({Resource.h2d: max(0, layers + model.lm_head_bytes - stays) / GB * s_per_gb})
    prefill_weight, decode_weight = objective_weights(p.workload, p.batch, passes[0].chunk_tokens)
    prefill_s = min(c.phase.bill(units + copied, KvPrice(), 0).lasts() for c in passes)
    phase = decode_phase(hardware, model, p.workload, p.batch, blocks, p.forms)
    shared = _shared(problem, copied) + _attended(problem, page.layer_bytes * phase.kv_read)
    step = phase.bill(units + shared + _experts(problem, table, vram, dram), KvPrice(), 0, launched=0)
    return with_wait(p.workload, p.batch, prefill_weight * prefill_s + decode_weight * step.lasts())


def _shared(problem: Problem, copied: Price) -> Price:
    """``copied`` in a decode step, where the CPU may compute all FFN units and the LM head, if it multiplies faster than they come."""
    p = problem
    units = [*(p.model.of_kind(UnitKind.ffn) if most_host_units(p) else ()), *((head_block(p.model, 1),) if most_host_blocks(p) else ())]
    if not units:
        return copied
    beside = Beside.of(p.hardware, p.model, p.batch, p.forms)
    gbps = max(unit.stored_bytes / GB / beside.alone_s(unit) for unit in units)
    spared_s = sum(max(0.0, -(unit := beside.computed(spec)).of(Resource.card) - unit.of(Resource.cpu)) for spec in units)
    copied_s = copied.of(Resource.h2d)
    peak = p.hardware.gpu.h2d.peak if p.hardware.gpu else 0.0
    return Price({Resource.h2d: copied_s * peak / (peak + gbps), Resource.card: -spared_s})


def _attended(problem: Problem, layer_bytes: float) -> Price:
    """What the card is spared where the CPU attends to all layers, each of ``layer_bytes``, and is sooner than the card."""
    if not most_attended(problem):
        return NOTHING
    one = Beside.of(problem.hardware, problem.model, problem.batch, problem.forms).attends.attended(layer_bytes)
    return Price({Resource.card: -problem.model.layers * max(0.0, -one.of(Resource.card) - one.of(Resource.cpu))})


def _stored_share(problem: Problem) -> float:
    """The most stored bytes that a byte of VRAM spares a pass: less than 1 where all units that may stay there stay decoded."""
    model, stay = problem.model, problem.model.decoded(problem.forms.decoded)
    stored, kept = ((*one.attn_bytes, *one.ffn_bytes, one.lm_head_bytes) for one in (model, stay))
    return max(nbytes / kept_bytes for nbytes, kept_bytes in zip(stored, kept, strict=True) if kept_bytes)


def _experts(problem: Problem, table: PriceTable, vram: int, dram: int) -> Price:
    """Reading and copying the experts that a decode step misses with all of VRAM's and DRAM's bytes given to slots."""
    experts = problem.model.experts
    if experts is None:
        return Price()
    slots = (min(experts.units, nbytes // experts.expert_bytes) / len(experts.layers) for nbytes in (vram, vram + dram))
    copied, read = (len(experts.layers) * visit(experts, problem.batch).missed(kept) for kept in slots)
    nbytes, spared = experts.expert_bytes, NOTHING
    if problem.force.expert_host is MissedExperts.split:  # the CPU may compute what DRAM holds
        # a plan may leave experts to it that VRAM could keep: where the card binds, it is spared them
        most = len(experts.layers) * visit(experts, problem.batch).touched * fetching_turns(problem.model)
        spared = Price({Resource.card: -expert_step_s(problem.hardware, problem.model, problem.batch) * most})
        copied = read
    return table.brought(nbytes, Tier.ssd, Place.host) * read + table.brought(nbytes, Tier.dram, Place.ring, nbytes) * copied + spared
