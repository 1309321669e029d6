"""A quick lower bound on a problem's objective: every byte of memory used, and every link at its best rate."""

from __future__ import annotations

import math

from penstock.planner.common.measures import GB
from penstock.planner.contract.experts.expert_misses import visit
from penstock.planner.contract.prices.cost import objective_weights
from penstock.planner.contract.prices.memory_law import OVERHEADS, dram_workspace_bytes
from penstock.planner.contract.prices.reuse import kept_set
from penstock.planner.contract.prices.stages import decode_compute_s, expert_copy_s
from penstock.planner.solver.terms.menu import chunk_menu, pass_menu, ssd_menu
from penstock.planner.solver.terms.page_menu import page_menu
from penstock.planner.solver.terms.problem import Problem


def bound_s(problem: Problem) -> float:
    """No plan for ``problem`` is faster; infinite when it cannot fit. Takes no solve."""
    p, model, hardware = problem, problem.model, problem.hardware
    (page,) = page_menu(hardware, model, p.workload, p.force, p.batch)
    passes = pass_menu(hardware, model, p.workload, p.force, p.batch, kept_set(p.workload, page.page_tokens))
    working = min(c.activation_bytes for c in passes) + model.norm_bytes
    if not p.workload.kv_spill:
        working += model.layers * page.layer_bytes
    dram = hardware.dram_bytes - p.workload.dram_reserve_bytes - dram_workspace_bytes(hardware, model)
    vram = 0
    if hardware.gpu:
        vram = hardware.vram_bytes - p.workload.vram_guard_bytes - hardware.gpu.context_bytes - OVERHEADS.cuda_workspace_bytes - working
    else:
        dram -= working
    if min(vram, dram) < 0:
        return math.inf
    fastest = max(c.gbps for c in ssd_menu(hardware, p.model, p.force))
    layers = sum(model.attn_bytes) + sum(model.ffn_bytes)
    ssd_s = max(0, layers - vram - dram) / GB / fastest
    h2d_s = 0.0
    if hardware.gpu:
        h2d_s = max(0, layers + model.lm_head_bytes - vram) / GB * min(min(c.s_per_gb) for c in chunk_menu(hardware, model, p.force))
    experts_ssd_s, experts_h2d_s = _experts_s(problem, vram, dram, fastest)
    stream_s = max(ssd_s, h2d_s)
    prefill_weight, decode_weight = objective_weights(p.workload, p.batch)
    prefill_s = min(max(c.compute_s, c.passes * stream_s) for c in passes)
    step_s = max(ssd_s + experts_ssd_s, h2d_s + experts_h2d_s, decode_compute_s(hardware, model, p.workload, p.batch))
    return prefill_weight * prefill_s + decode_weight * step_s


def _experts_s(problem: Problem, vram: int, dram: int, ssd_gbps: float) -> tuple[float, float]:
    """Seconds of reading and copying the experts that a decode step misses with all of VRAM's and DRAM's bytes given to slots."""
    experts, gpu = problem.model.experts, problem.hardware.gpu
    if experts is None:
        return 0.0, 0.0
    slots = (min(experts.units, nbytes // experts.expert_bytes) / len(experts.layers) for nbytes in (vram, vram + dram))
    missed_vram, missed_dram = (len(experts.layers) * visit(experts, problem.batch).missed(kept) for kept in slots)
    h2d_s = missed_vram * expert_copy_s(gpu, experts, experts.expert_bytes) if gpu else 0.0
    return missed_dram * experts.expert_bytes / GB / ssd_gbps, h2d_s
