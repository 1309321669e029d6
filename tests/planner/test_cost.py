"""The cost model: each figure from first principles."""

from dataclasses import replace

import pytest

from penstock.planner.contract.bills.cost import load_s, objective_weights, predict
from penstock.planner.contract.bills.prefill import Moved
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.placement import place
from penstock.planner.contract.given.formats import QUANTISED
from penstock.planner.contract.given.hardware import SsdPoint
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.given.workload import Objective
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.launches import issue_s
from penstock.planner.contract.prices.memory_law import dram_use, used_bytes, vram_use
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.prices.sizes import activation_bytes
from penstock.planner.contract.prices.stages import (
    attended_s,
    earlier_kv,
    elementwise_bytes_per_token,
    h2d_gbps,
    prefill_compute_s,
    ssd_gbps,
    weight_pass_s,
    weight_read_s,
)
from penstock.planner.simulate.act import Simulation
from penstock.planner.solver.program import solve
from penstock.planner.solver.terms.menu import chunk_menu
from tests.planner.small import GB, MB, gpu, machine, model, with_units, work

FAST_SSD = (SsdPoint(2**24, 8, 50.0),)


def planned(hardware, m, w, **force):
    decisions = solve(hardware, m, w, Force(**force))
    return decisions, predict(hardware, m, w, decisions)


def test_a_decode_step_reads_what_no_memory_keeps():
    hardware, m = machine(vram=0, dram=GB), model(12)
    decisions, predicted = planned(hardware, m, work())
    streamed = 12 - decisions.weights.dram.cap_layers
    assert 0 < streamed < 12
    assert predicted.ssd_bytes_per_token == streamed * 160 * MB
    rate = ssd_gbps(hardware, decisions.weights.ssd.block_bytes, decisions.weights.ssd.queue_depth)
    assert predicted.decode_stages["ssd"] == pytest.approx(streamed * 0.16 / rate)
    assert predicted.decode_s_per_token == max(predicted.decode_stages.values())
    assert predicted.bottleneck_decode is Resource.ssd


def test_without_a_gpu_nothing_crosses_pcie_and_everything_lies_in_dram():
    hardware, m = machine(vram=0, dram=GB), model(12)
    decisions, predicted = planned(hardware, m, work())
    assert (predicted.h2d_bytes_per_token, predicted.vram_bytes, predicted.decode_stages["h2d"]) == (0, 0, 0.0)
    use = dram_use(hardware, m, work(), decisions)
    assert use["norms"] == m.norm_bytes and use["kv"] > 0 and use["activations"] > 0
    assert use["embedding_head"] >= m.embed_bytes + m.head_bytes


def test_h2d_moves_every_unit_that_is_not_resident():
    hardware, m = machine(vram=GB), model(12)
    decisions, predicted = planned(hardware, m, work())
    assert predicted.h2d_bytes_per_token == place(m, decisions.weights, True).h2d_bytes_per_pass > 0
    assert predicted.bottleneck_decode is Resource.h2d


def test_guard_and_reserve_bind_the_plan_but_are_not_used_bytes():
    hardware, m = machine(vram=GB, dram=2 * GB), model(12)
    w = work(vram_guard_bytes=50 * MB, dram_reserve_bytes=70 * MB)
    decisions, predicted = planned(hardware, m, w)
    vram, dram = vram_use(hardware, m, w, decisions), dram_use(hardware, m, w, decisions)
    assert predicted.vram_bytes == used_bytes(vram) == sum(vram.values()) - 50 * MB
    assert predicted.dram_bytes == sum(dram.values()) - 70 * MB


@pytest.mark.parametrize("hardware", [machine(), machine(vram=0)])
@pytest.mark.parametrize("chunk", [512, 100])
def test_a_prefill_from_a_later_token_on_computes_the_rest_of_the_whole(hardware, chunk):
    """Products and attention of two parts are those of the whole; only the weights are read once more in each."""
    m, w = model(), work(prompt_tokens=512)
    quick = replace(hardware, cpu_matvec_gbps=1e9, gpu=hardware.gpu and replace(hardware.gpu, memory_gbps=1e9), layer_launch_s=1e-12)
    if quick.gpu is None:
        m = replace(m, hidden=1)  # the matrix library's packing is another matter
    head = prefill_compute_s(quick, m, replace(w, prompt_tokens=300), 2, chunk)
    rest = prefill_compute_s(quick, m, w, 2, chunk, 300)
    whole = prefill_compute_s(quick, m, w, 2, chunk)
    assert head + rest == pytest.approx(whole, rel=0.25 if quick.gpu is None else 0.02)
    assert 0 < rest < whole


def test_a_pass_that_begins_later_still_reads_what_lies_before():
    w = work(prompt_tokens=1000, new_tokens=24)
    assert earlier_kv(w, 1) == 0 and earlier_kv(w, 1, 500) == pytest.approx(500 / 1024)
    assert earlier_kv(w, 4, 200) == pytest.approx((200 + 400 + 600 + 800) / 1024)


def test_tokens_per_second_counts_the_whole_batch():
    _, predicted = planned(machine(), model(), work(batch=4))
    assert predicted.decode_tokens_per_s == pytest.approx(4 / predicted.decode_s_per_token)


def test_a_prefill_in_passes_streams_the_weights_once_each():
    hardware, m = machine(vram=GB), model(12)
    decisions, once = planned(hardware, m, work(), prefill_chunk_tokens=512)
    halves = predict(hardware, m, work(), replace(decisions, prefill_chunk_tokens=256))
    assert halves.prefill_stages["h2d"] == pytest.approx(2 * once.prefill_stages["h2d"])
    assert halves.decode_s_per_token == once.decode_s_per_token


def test_a_prompt_waits_for_the_blocks_of_an_lm_head_that_streams():
    """One of five blocks, of a prompt whose compute takes longer than all copies: acted out, it waits as the closed form says."""
    hardware, m, w = machine(vram=2 * GB), model(16, table=560 * MB), work(prompt_tokens=2048, new_tokens=2)
    found, streams = (planned(hardware, m, w, **force) for force in ({}, {"resident_head": 0}))
    assert found[0].weights.vram.resident_units.head == found[0].weights.head_blocks == 5
    assert streams[1].prefill_s > 1.1 * streams[1].prefill_stages["card"] > 1.1 * streams[1].prefill_stages["h2d"]
    for decisions, predicted in (found, streams):
        simulated = Simulation(Plan(hardware, m, w, decisions, predicted)).run().record.prefill_ns[-1] / 1e9
        assert predicted.prefill_s == pytest.approx(simulated, rel=0.05)


def test_copies_run_at_the_rate_of_the_smaller_of_unit_and_chunk():
    assert h2d_gbps(gpu(), 2**26, 2**26) == 55.0
    assert h2d_gbps(gpu(), 2**18, 2**26) == h2d_gbps(gpu(), 2**26, 2**18) == 20.0


def test_small_copies_take_as_long_as_the_host_takes_to_issue_them():
    """79 us on the link and 137 us of the host, as an H100 took with copies of 4 MiB."""
    busy = gpu(copy_s=137e-6)
    found = h2d_gbps(busy, 2**30, 2**22)
    assert found == pytest.approx(2**22 / 137e-6 / GB) and found < h2d_gbps(gpu(), 2**30, 2**22)
    assert h2d_gbps(busy, 2**30, 2**26) == 55.0 == h2d_gbps(gpu(), 2**30, 2**26)
    sizes = {choice.chunk_bytes for choice in chunk_menu(machine(gpu=gpu(copy_s=2e-3)), model(), Force())}
    assert min(sizes) > 2**26 and len(sizes) == 1, "a slow host takes whole units"


def test_a_phase_lasts_as_long_as_what_it_moves_takes_on_the_hosts_bus():
    """Reads and copies pass once each, KV that is copied back does, too, and what spills to the SSD is read for it."""
    m, w = model(12), work(prompt_tokens=2000, kv_spill=True)
    free, narrow = (machine(GB, GB, ssd_read=FAST_SSD, dram_bus_gbps=rate) for rate in (0.0, 40.0))
    decisions, _ = planned(free, m, w, page_tokens=256, prefill_chunk_tokens=500)
    made = replace(decisions, kv=replace(decisions.kv, vram_pages=0, ssd_pages=decisions.kv.pages))
    alone, beside, moved = predict(free, m, w, made), predict(narrow, m, w, made), Moved.of(narrow, m, made)
    assert alone.decode_stages["dram"] == 0.0
    step = alone.ssd_bytes_per_token + alone.h2d_bytes_per_token + moved.kv_h2d_bytes / w.max_tokens
    assert beside.decode_stages["dram"] == pytest.approx(step / 40e9) and beside.bottleneck_decode is Resource.dram
    assert beside.decode_s_per_token == beside.decode_stages["dram"] > alone.decode_s_per_token
    assert {s: t for s, t in beside.decode_stages.items() if s != "dram"} == {s: t for s, t in alone.decode_stages.items() if s != "dram"}
    weights, filled = (
        4 * (place(m, made.weights, True).ssd_bytes_per_pass + place(m, made.weights, True).h2d_bytes_per_pass),
        2000 / w.max_tokens,
    )
    earlier = earlier_kv(w, 4)
    kv = (earlier + filled) * (moved.kv_ssd_bytes + moved.kv_h2d_bytes)
    assert beside.prefill_stages["dram"] == pytest.approx((weights + kv) / 40e9)


def test_the_cpus_products_pass_the_bus_too():
    m, w = model(12), work()
    decisions, predicted = planned(machine(0, GB, dram_bus_gbps=40.0, cpu_matvec_gbps=80.0), m, w)
    weights = sum(m.attn_bytes) + sum(m.ffn_bytes) + m.lm_head_bytes
    kv = (w.prompt_tokens + w.new_tokens / 2) * m.kv_bytes_per_token
    assert predicted.decode_stages["dram"] == pytest.approx((weights + kv + predicted.ssd_bytes_per_token) / 40e9)
    assert predicted.decode_stages["dram"] > predicted.decode_stages["cpu"]


def test_what_lies_between_matrix_products_adds_to_a_long_prefill():
    m, hardware = model(12), machine()
    quick = replace(hardware, gpu=replace(hardware.gpu, memory_gbps=1e9, dense_tflops=1e9, attention_tflops=1e9))
    slow = replace(quick, gpu=replace(quick.gpu, memory_gbps=100.0, attention_tflops=1e9))
    w = work(prompt_tokens=65536)
    bytes_moved = 65536 * elementwise_bytes_per_token(m, False)
    assert prefill_compute_s(slow, m, w, 1, 65536) == pytest.approx(bytes_moved / 100e9, rel=1e-3)
    assert 20 * m.hidden * m.layers * m.compute_dtype.nbytes < elementwise_bytes_per_token(m, False)


def test_a_card_that_has_rested_multiplies_faster_for_a_while():
    m, w, usual = model(12), work(prompt_tokens=4096), machine()
    usual = replace(usual, gpu=replace(usual.gpu, memory_gbps=1e9))

    def seconds(burst_s, faster=2.0, **more):
        quick = replace(usual, gpu=replace(usual.gpu, burst_tflops=faster * usual.gpu.dense_tflops, burst_s=burst_s))
        return prefill_compute_s(quick, m, w, 1, 4096, **more)

    always = prefill_compute_s(usual, m, w, 1, 4096)
    assert seconds(always) == pytest.approx(always / 2)
    assert seconds(always / 10) == pytest.approx(0.9 * always), "it saves as long as it lasts"
    assert seconds(always / 10, after_s=always / 20) == pytest.approx(0.95 * always)
    assert seconds(always, after_s=always) == seconds(always, 0.9) == seconds(always, 0.0) == always


def test_ssd_rates_hold_at_measured_points_and_below_them():
    hardware = machine()
    assert ssd_gbps(hardware, 2**22, 8) == 5.0
    assert 5.0 < ssd_gbps(hardware, 2**23, 8) < 7.0
    assert ssd_gbps(hardware, 2**22, 16) == 5.0, "a deeper queue than measured promises nothing"
    assert ssd_gbps(hardware, 2**21, 8) == 2.5, "nor does a smaller block"
    assert ssd_gbps(replace(hardware, ssd_read=hardware.ssd_read[1:]), 2**22, 4) == 2.5


def test_the_embedding_table_in_dram_costs_a_lookup_per_pass():
    hardware, m = machine(), model()
    decisions, in_vram = planned(hardware, m, work(), embedding=Tier.vram)
    moved = replace(decisions, weights=replace(decisions.weights, embedding=Tier.dram))
    assert predict(hardware, m, work(), moved).decode_s_per_token > in_vram.decode_s_per_token


@pytest.mark.parametrize("hardware", [machine(), machine(vram=0, dram=64 * GB)])
def test_a_dense_layer_is_issued_in_the_time_that_was_measured_and_an_moe_layer_by_its_operations(hardware):
    measured, on_gpu = hardware.layer_launch_s, hardware.gpu is not None
    for tokens in (1, 512):
        assert issue_s(hardware, model(16), tokens) == 16 * measured
    one, many = (issue_s(hardware, model(16, experts=8), tokens) / (16 * measured) for tokens in (1, 512))
    assert (one, many) == pytest.approx((85 / 59, 157 / 59) if on_gpu else (79 / 55, 145 / 55))
    slow = replace(hardware, layer_launch_s=1.0)
    read_s = weight_read_s(slow, model(16, experts=8), 1)
    assert weight_pass_s(slow, model(16, experts=8), 1) == pytest.approx(16 * one + (0 if on_gpu else read_s))


def test_a_moe_step_computes_only_the_experts_it_touches():
    hardware = machine(layer_launch_s=1e-6)
    _, dense = planned(hardware, model(ffn=128 * MB), work())
    decisions, sparse = planned(hardware, model(ffn=128 * MB, experts=8), work())
    assert sparse.decode_stages["card"] < dense.decode_stages["card"]
    assert decisions.experts.vram_slots == 8 * 8 and decisions.experts.dram_slots == 0


@pytest.mark.parametrize(
    "objective, weights",
    [(Objective.latency, (3, 3 * 64)), (Objective.throughput, (2.5, 2.5 * 64)), (Objective.ttft, (1.0, 0.064))],
)
def test_objectives_weigh_prefill_and_decode(objective, weights):
    assert objective_weights(work(objective=objective, requests=10), 4, 512) == pytest.approx(weights)


def test_activations_grow_with_tokens_and_batch():
    m, w = model(), work()
    assert activation_bytes(m, w, 1, 512) > activation_bytes(m, w, 1, 256) > activation_bytes(m, w, 1, 1)
    assert activation_bytes(m, w, 4, 256) == 4 * activation_bytes(m, w, 1, 256)


def test_kv_that_spills_is_read_every_step():
    w = work(batch=8, prompt_tokens=4096, kv_spill=True)
    hardware, m = machine(vram=900 * MB), model(12)
    decisions, predicted = planned(hardware, m, w)
    spilled = decisions.kv.dram_pages + decisions.kv.ssd_pages
    assert spilled > 0
    none = replace(decisions, kv=replace(decisions.kv, vram_pages=decisions.kv.pages, dram_pages=0, ssd_pages=0))
    assert predicted.decode_stages["h2d"] > predict(hardware, m, w, none).decode_stages["h2d"]
    assert predicted.prefill_stages["d2h"] > 0


def test_loading_fills_the_slots_that_layers_pass_through() -> None:
    hardware, m = machine(vram=0, dram=1500 * MB), model(12)
    decisions, cold = planned(hardware, m, work())
    ssd = decisions.weights.ssd
    placement, rate = place(m, decisions.weights, False), ssd_gbps(hardware, ssd.block_bytes, ssd.queue_depth) * GB
    passing = decisions.weights.dram.hwm_layers - decisions.weights.dram.resident_layers
    read = m.weight_bytes - placement.ssd_bytes_per_pass + passing * placement.dram_slot_bytes
    assert placement.ssd_layers and passing > 0
    assert cold.load_s == pytest.approx(read / rate)


def test_loading_reads_at_the_rate_of_where_the_weights_lie():
    hardware, m = machine(vram=0), model(12)
    decisions, cold = planned(hardware, m, work())
    rate = ssd_gbps(hardware, decisions.weights.ssd.block_bytes, decisions.weights.ssd.queue_depth)
    assert cold.load_s == pytest.approx(m.weight_bytes / rate / GB)
    first_s = 3 * cold.decode_stages["cpu"]
    assert load_s(hardware, m, work(), decisions, cached=1.0) == pytest.approx(max(first_s, m.weight_bytes / hardware.dram_copy_gbps / GB))
    slow = replace(hardware, pin_s_per_gb=100.0)
    assert load_s(slow, m, work(), decisions) == pytest.approx(cold.dram_bytes / GB * 100 - 4), "page-locking begins before the imports"


def test_without_a_card_torch_attends_more_slowly_than_weights_are_read_but_for_coded_ones() -> None:
    plain, asked = model(8), work(prompt_tokens=2000, batch=4)
    slow = machine(0, cpu_attention_gbps=2.0, cpu_attention_tflops=0.1)
    each = 2 * plain.attn_width * 2 * plain.layers
    coded = with_units(plain, *(replace(unit, format=QUANTISED["INT4-128"]) for unit in plain.of_kind(UnitKind.ffn)))
    assert attended_s(slow, coded, 1000) == attended_s(machine(0), coded, 1000) < attended_s(slow, plain, 1000)
    assert attended_s(slow, plain, 1000) == pytest.approx(1000 * each / 2e9)
    assert attended_s(machine(0), plain, 1000) == pytest.approx(1000 * plain.kv_bytes_per_token / machine(0).cpu_matvec_gbps / 1e9)
    assert attended_s(replace(machine(), cpu_attention_gbps=2.0), plain, 1000) == attended_s(machine(), plain, 1000)
    made = solve(machine(0), plain, asked)
    before, after = (predict(one, plain, asked, made) for one in (machine(0), slow))
    more_s = (2000 + asked.new_tokens / 2) * 4 * (each / 2e9 - plain.kv_bytes_per_token / machine(0).cpu_matvec_gbps / 1e9)
    assert after.decode_s_per_token - before.decode_s_per_token == pytest.approx(more_s, rel=0.02)
    assert after.prefill_s > before.prefill_s
