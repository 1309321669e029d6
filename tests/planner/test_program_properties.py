"""The program against first principles: every rule recomputed, brute force over small instances, more is never slower."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from penstock.planner.contract.bills.cost import objective_s, predict
from penstock.planner.contract.decided.decisions import Decisions, KvPages, ResidentUnits, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.placement import head_blocks
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import SsdPoint
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.given.workload import Objective
from penstock.planner.contract.prices.memory_law import dram_use, vram_use
from penstock.planner.contract.prices.sizes import expert_dram_bytes, expert_vram_bytes
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.solver.infeasible import Infeasible
from penstock.planner.solver.program import search, solve
from penstock.planner.solver.terms.menu import ssd_menu
from tests.planner.small import MB, blocks, gpu, machine, model, with_units, work

SLOWER = 1.005 * (1 + 1e-6)
PHASES = (Phase.explicit, Phase.generate)
"""No shrinking: one example of the brute force takes a second."""
QUICK = settings(max_examples=50, deadline=None, derandomize=True)


@st.composite
def models(draw, fewest=3, most=40):
    attn, ffn = draw(st.integers(5, 60)), draw(st.integers(20, 300))
    table, tied, experts = draw(st.integers(5, 200)), draw(st.booleans()), draw(st.sampled_from([0, 0, 4]))
    made = model(draw(st.integers(fewest, most)), attn * MB, ffn * MB // 4 * 4, table * MB, tied, experts)
    if made.experts is None:
        return made
    told = {"second_tier": draw(st.sampled_from([0.5, 0.0, 0.67, 1.0])), "foreseen": draw(st.sampled_from([0.0, 0.0, 0.9, 1.0]))}
    return replace(made, routers=replace(made.routers, **told))


@st.composite
def machines(draw, m, gpu_too=None):
    """Capacities as shares of the weights, so that every way to stream comes up; rates far apart."""
    points = tuple(SsdPoint(b, q, draw(st.floats(0.3, 12))) for b, q in ((2**22, 4), (2**23, 8)))
    rates = sorted(draw(st.tuples(st.floats(2, 55), st.floats(2, 55))))
    curve = Curve(((2**20, rates[0]), (2**25, rates[1])))
    share = st.floats(0.02, 1.3)
    with_gpu = draw(st.booleans()) if gpu_too is None else gpu_too
    vram = int((400 * MB + draw(share) * m.weight_bytes) if with_gpu else 0)
    dram = int(300 * MB + draw(share) * m.weight_bytes)
    change = {"ssd_read": points, "cpu_matvec_gbps": draw(st.floats(5, 100)), "cpu_dense_tflops": draw(st.floats(0.2, 5))}
    change["dram_bus_gbps"] = draw(st.sampled_from([0.0, 3.0, 20.0, 60.0, 120.0]))
    if with_gpu:
        tflops = draw(st.floats(1, 400))
        piece_s, change["layer_launch_s"] = draw(st.sampled_from([(0.0, 2e-4), (2e-5, 2e-4), (2e-5, 2e-3)]))
        change["gpu"] = gpu(h2d=curve, d2h=curve, dense_tflops=tflops, prompt_piece_s=piece_s)
    return machine(vram, dram, **change)


@st.composite
def workloads(draw, spill=None):
    return work(
        batch=draw(st.sampled_from([1, 1, 3])),
        prompt_tokens=draw(st.integers(1, 2000)),
        new_tokens=draw(st.integers(1, 300)),
        objective=draw(st.sampled_from(list(Objective))),
        kv_spill=draw(st.booleans()) if spill is None else spill,
    )


def solved(hardware, m, w):
    try:
        return search(hardware, m, w)
    except Infeasible:
        return None


@QUICK
@given(st.data())
def test_every_plan_holds_every_rule_and_costs_what_the_program_says(data):
    m = data.draw(models())
    hardware, w = data.draw(machines(m)), data.draw(workloads())
    found = solved(hardware, m, w)
    assume(found)
    assert broken_rules(hardware, m, w, found.decisions) == []
    predicted = predict(hardware, m, w, found.decisions)
    assert predicted.total_s == objective_s(hardware, m, w, found.decisions), "which brute force asks"
    assert found.best_s * (1 - 1e-5) <= predicted.total_s <= found.best_s * SLOWER
    assert predicted.vram_bytes <= hardware.vram_bytes and predicted.dram_bytes <= hardware.dram_bytes


@settings(QUICK, max_examples=30)
@given(st.data())
def test_more_memory_or_bandwidth_never_predicts_slower(data):
    m = data.draw(models())
    hardware, w = data.draw(machines(m)), data.draw(workloads(False))
    before = solved(hardware, m, w)
    assume(before)
    more = data.draw(st.sampled_from(["dram", "ssd", "compute", "bus", *(["vram", "link"] if hardware.gpu else [])]))
    if more == "vram":
        better = replace(hardware, vram_bytes=hardware.vram_bytes * 5 // 4)
    elif more == "dram":
        better = replace(hardware, dram_bytes=hardware.dram_bytes * 5 // 4)
    elif more == "ssd":
        better = replace(hardware, ssd_read=tuple(replace(p, gbps=1.5 * p.gbps) for p in hardware.ssd_read))
    elif more == "link":
        faster = Curve(tuple((size, 1.5 * rate) for size, rate in hardware.gpu.h2d.points))
        better = replace(hardware, gpu=replace(hardware.gpu, h2d=faster))
    elif more == "bus":
        better = replace(hardware, dram_bus_gbps=1.5 * hardware.dram_bus_gbps)
    elif hardware.gpu:
        better = replace(hardware, gpu=replace(hardware.gpu, dense_tflops=2 * hardware.gpu.dense_tflops, memory_gbps=1600.0))
    else:
        better = replace(hardware, cpu_matvec_gbps=2 * hardware.cpu_matvec_gbps, cpu_dense_tflops=2 * hardware.cpu_dense_tflops)
    after = search(better, m, w)
    assert after.best_s <= before.best_s * (1 + 1e-5)
    slowest = predict(hardware, m, w, before.decisions).total_s
    assert predict(better, m, w, after.decisions).total_s <= slowest * SLOWER


def every_decision(hardware, m, w, base: Decisions):
    """All that the program could choose for a small instance: residents, caches, reads, tables, passes, KV tiers, prompts that are recorded
    where nothing streams, and as many expert slots as fit. Routers stay in VRAM."""
    n, on_gpu = m.layers, hardware.gpu is not None
    blocks = head_blocks(m) if on_gpu else 1
    counts = range(n + 1) if on_gpu else [0]
    ffns = [n] if on_gpu and m.experts else counts
    heads = range(blocks + 1) if on_gpu else [0]
    tables = (Tier.vram, Tier.dram) if on_gpu else (Tier.dram,)
    # experts are read one after the other where the drive allows it, which no prediction knows: such reads are no choice of the program's
    points = ssd_menu(hardware, m, Force()) if m.experts else hardware.ssd_read
    reads = [(p.block_bytes, p.queue_depth) for p in points]
    chunks = [w.prompt_tokens]
    while chunks[-1] >= 512:
        chunks.append(-(-chunks[-1] // 2))
    chunks = sorted({*chunks, base.prefill_chunk_tokens})
    for attn, ffn, head, embedding in product(counts, ffns, heads, tables):
        through = n - min(attn, ffn)
        for cap, (block, depth), chunk, kv in product(range(through + 1), reads, chunks, kv_choices(w, base, on_gpu)):
            v = base.weights
            weights = replace(
                v,
                embedding=embedding,
                head_blocks=blocks,
                vram=replace(v.vram, resident_units=ResidentUnits(attn, ffn, head)),
                dram=replace(v.dram, cap_layers=cap, hwm_layers=cap + 3, prefetch_distance=cap + 3, resident_layers=cap),
                ssd=replace(v.ssd, block_bytes=block, queue_depth=depth, staging_bytes=block * depth),
            )
            made = replace(base, weights=weights, kv=kv, prefill_chunk_tokens=chunk, recorded_prompt_tokens=0)
            yield replace(made, experts=most_slots(hardware, m, w, made)) if m.experts else made
            if on_gpu and (attn, ffn, head) == (n, n, blocks):
                yield replace(made, recorded_prompt_tokens=base.batch * chunk)


def most_slots(hardware, m, w, made):
    """As many slots as each tier has room for: one more never costs time."""
    none, units = replace(made, experts=replace(made.experts, vram_slots=0, dram_slots=0)), m.experts.units
    in_vram = in_dram = 0
    if hardware.gpu:
        free = hardware.vram_bytes - 4096 - sum(vram_use(hardware, m, w, none).values())
        in_vram = min(units, max(fewest_slots(m.experts), free // expert_vram_bytes(m.experts)))
    if in_vram < units:
        free = hardware.dram_bytes - 4096 - sum(dram_use(hardware, m, w, none).values())
        in_dram = min(units, max(fewest_slots(m.experts), free // expert_dram_bytes(m.experts)))
    return replace(made.experts, vram_slots=in_vram, dram_slots=in_dram)


def kv_choices(w, base, on_gpu):
    if not w.kv_spill:
        return [base.kv]
    choices = []
    for tokens in (256, 512):
        need = w.batch * -(-w.max_tokens // tokens)
        home = range(need + 1) if on_gpu else [0]
        choices += [KvPages(tokens, a, b, need - a - b) for a in home for b in range(need - a + 1)]
    return choices


def brute_force(hardware, m, w, base):
    best = float("inf")
    for decisions in every_decision(hardware, m, w, base):
        if broken_rules(hardware, m, w, decisions):
            continue
        best = min(best, objective_s(hardware, m, w, decisions))
    return best


@settings(max_examples=11, deadline=None, derandomize=True, phases=PHASES)
@given(st.data())
def test_the_program_equals_brute_force_with_a_gpu(data):
    m = data.draw(models(3, 4))
    assume(head_blocks(m) <= 3)
    hardware, w = data.draw(machines(m, True)), data.draw(workloads(False))
    found = solved(hardware, m, w)
    assume(found)
    best = brute_force(hardware, m, w, found.decisions)
    assert found.best_s == pytest.approx(best, rel=1e-5)
    assert predict(hardware, m, w, found.decisions).total_s <= best * SLOWER


@settings(max_examples=60, deadline=None, derandomize=True, phases=PHASES)
@given(st.data())
def test_the_program_equals_brute_force_without_a_gpu(data):
    m = data.draw(models(3, 12))
    hardware, w = data.draw(machines(m, False)), data.draw(workloads(False))
    found = solved(hardware, m, w)
    assume(found)
    assert found.best_s == pytest.approx(brute_force(hardware, m, w, found.decisions), rel=1e-5)


@settings(max_examples=5, deadline=None, derandomize=True, phases=PHASES)
@given(st.data())
def test_spilled_kv_is_no_slower_than_brute_force_over_pages(data):
    m = data.draw(models(2, 2))
    assume(head_blocks(m) == 1)
    hardware = data.draw(machines(m))
    w = work(batch=2, prompt_tokens=700, new_tokens=data.draw(st.integers(20, 200)), kv_spill=True)
    found = solved(hardware, m, w)
    assume(found)
    assert found.best_s <= brute_force(hardware, m, w, found.decisions) * (1 + 1e-5)


def test_a_model_of_unequal_layers_gets_a_plan_that_holds():
    m = model(10)
    m = with_units(m, *blocks(UnitKind.ffn, (60 * MB,) * 3 + (120 * MB,) * 7))
    hardware = machine(vram=900 * MB, dram=800 * MB)
    assert broken_rules(hardware, m, work(), solve(hardware, m, work())) == []
