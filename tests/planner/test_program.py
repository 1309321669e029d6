"""What the program decides, what a user may force, and what it says when there is no plan."""

from dataclasses import replace

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import CachePolicy, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.hardware import SsdPoint
from penstock.planner.contract.given.workload import Objective
from penstock.planner.contract.prices.memory_law import ssd_need
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.prices.sizes import kv_page_bytes
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.solver.infeasible import Infeasible
from penstock.planner.solver.program import search, solve
from penstock.planner.solver.terms.menu import ssd_menu
from tests.planner.small import GB, MB, machine, model, work

STREAMING = machine(vram=GB, dram=GB)


def test_all_that_fits_in_vram_stays_there():
    hardware, m = machine(), model()
    d = solve(hardware, m, work())
    assert (d.weights.vram.resident_units.attn, d.weights.vram.resident_units.ffn) == (8, 8)
    assert d.weights.vram.resident_units.head == d.weights.head_blocks
    predicted = predict(hardware, m, work(), d)
    assert (predicted.h2d_bytes_per_token, predicted.ssd_bytes_per_token) == (0, 0)
    assert predicted.bottleneck_decode in (Resource.card, Resource.cpu)


def test_all_that_fits_in_dram_is_read_from_ssd_once():
    d = solve(machine(vram=0, dram=8 * GB), model(), work())
    assert d.weights.dram.cap_layers == d.weights.dram.resident_layers == 8


def test_without_a_gpu_there_is_no_ring_and_no_vram():
    d = solve(machine(vram=0, dram=GB), model(12), work())
    assert (d.weights.vram.slots, d.weights.vram.prefetch_distance, d.weights.head_blocks) == (0, 0, 1)
    assert d.weights.embedding is Tier.dram and d.kv.vram_pages == 0 and d.kv.dram_pages > 0


def test_pinned_layers_beat_the_rolling_window():
    found, rolling = (search(STREAMING, model(16), work(), force) for force in (None, Force(policy=CachePolicy.rolling)))
    assert found.decisions.weights.policy is CachePolicy.pinned and rolling.decisions.weights.policy is CachePolicy.rolling
    assert rolling.best_s > found.best_s


def test_a_rolling_window_can_be_forced_as_the_seeds_set_it():
    force = Force(policy=CachePolicy.rolling, cap_layers=50, hwm_layers=55, prefetch_distance=50)
    d = solve(machine(vram=GB, dram=16 * GB), model(80), work(), force)
    assert (d.weights.policy, d.weights.dram.resident_layers) == (CachePolicy.rolling, 0)
    assert (d.weights.dram.cap_layers, d.weights.dram.hwm_layers, d.weights.dram.prefetch_distance) == (50, 55, 50)


@pytest.mark.parametrize(
    "force, read",
    [
        (Force(cap_layers=1), lambda d: d.weights.dram.cap_layers == 1),
        (Force(hwm_layers=5), lambda d: d.weights.dram.hwm_layers == 5),
        (Force(prefetch_distance=4), lambda d: d.weights.dram.prefetch_distance == 4),
        (Force(resident_attn=2), lambda d: d.weights.vram.resident_units.attn == 2),
        (Force(resident_ffn=1), lambda d: d.weights.vram.resident_units.ffn == 1),
        (Force(resident_head=0), lambda d: d.weights.vram.resident_units.head == 0),
        (Force(embedding=Tier.vram), lambda d: d.weights.embedding is Tier.vram),
        (Force(vram_slots=3, vram_prefetch_distance=1), lambda d: (d.weights.vram.slots, d.weights.vram.prefetch_distance) == (3, 1)),
        (Force(vram_prefetch_distance=5), lambda d: d.weights.vram.slots >= 7),
        (Force(block_bytes=2**20, queue_depth=2), lambda d: d.weights.ssd.staging_bytes == 2**21),
        (Force(staging_bytes=2**26), lambda d: d.weights.ssd.staging_bytes == 2**26),
        (Force(chunk_bytes=2**20, in_flight=3), lambda d: (d.weights.h2d.chunk_bytes, d.weights.h2d.in_flight) == (2**20, 3)),
        (Force(page_tokens=64), lambda d: d.kv.page_tokens == 64),
        (Force(prefill_chunk_tokens=100), lambda d: d.prefill_chunk_tokens == 100),
    ],
)
def test_a_forced_decision_is_kept_and_the_rest_is_solved_around_it(force, read):
    d = solve(STREAMING, model(16), work(), force)
    assert read(d)
    assert broken_rules(STREAMING, model(16), work(), d) == []


@pytest.mark.parametrize(
    "force, words",
    [
        (Force(cap_layers=6, prefetch_distance=5), ["force.cap_layers=6", "force.prefetch_distance=5", "cap <= prefetch_distance <= hwm"]),
        (Force(cap_layers=2, hwm_layers=4), ["force.hwm_layers=4", "hwm = cap + k"]),
        (Force(cap_layers=17), ["force.cap_layers=17", "cap <= layers through DRAM"]),
        (Force(hwm_layers=2), ["force.hwm_layers=2"]),
        (Force(resident_attn=17), ["force.resident_attn=17"]),
        (Force(vram_slots=3, vram_prefetch_distance=2), ["force.vram_slots=3", "vram_slots >= vram_prefetch_distance + 2"]),
        (Force(embedding=Tier.ssd), ["force.embedding=ssd", "embedding tier"]),
        (Force(block_bytes=5000), ["force.block_bytes=5000", "block multiple of 4096"]),
        (Force(staging_bytes=4096), ["force.staging_bytes=4096", "staging >= block x queue depth"]),
        (Force(queue_depth=0), ["force.queue_depth=0"]),
        (Force(page_tokens=48), ["force.page_tokens=48", "KV page size"]),
        (Force(in_flight=0), ["force.in_flight=0"]),
        (Force(expert_vram_slots=1), ["force.expert_vram_slots=1", "allowed: 3 to 128", "set force.expert_vram_slots=3"]),
        (Force(expert_dram_slots=129), ["force.expert_dram_slots=129", "allowed: 3 to 128", "set force.expert_dram_slots=128"]),
        (Force(expert_prefetch=3), ["moe.prefetch=3", "allowed: 0 to 2"]),
        (Force(expert_read_ahead=3), ["moe.read_ahead=3", "allowed: 0 to 2"]),
        (Force(expert_in_flight=9), ["moe.in_flight=9", "allowed: 1 to 8"]),
        (Force(expert_chunk_bytes=1), ["moe.chunk_bytes=1", "experts.chunk_bytes range"]),
    ],
)
def test_a_forced_value_that_breaks_a_rule_is_refused_with_rule_and_key(force, words):
    with pytest.raises(UserError) as refused:
        solve(STREAMING, model(16, experts=8), work(), force)
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert "\n" not in str(refused.value) and not isinstance(refused.value, Infeasible)


@pytest.mark.parametrize(
    "force, key", [(Force(expert_dram_slots=8), "force.expert_dram_slots=8"), (Force(expert_prefetch=1), "moe.prefetch=1")]
)
def test_a_dense_model_has_no_experts_to_decide_about(force, key):
    with pytest.raises(UserError, match=f"{key}: small has no routed experts"):
        solve(STREAMING, model(16), work(), force)


def test_expert_slots_that_do_not_fit_are_offered_to_be_dropped():
    with pytest.raises(Infeasible, match="drop force.expert_vram_slots"):
        solve(STREAMING, model(16, experts=8), work(), Force(expert_vram_slots=100))


def test_vram_residents_cannot_be_forced_without_a_gpu():
    with pytest.raises(UserError, match="force.resident_attn=1"):
        solve(machine(vram=0, dram=2 * GB), model(), work(), Force(resident_attn=1))


@pytest.mark.parametrize(
    "hardware, tier, key",
    [
        (machine(vram=300 * MB), Tier.vram, "vram_bytes"),
        (machine(dram=300 * MB, vram=GB), Tier.dram, "dram_bytes"),
        (machine(vram=0, dram=400 * MB), Tier.dram, "dram_bytes"),
        (machine(ssd=GB), Tier.ssd, "ssd_bytes"),
    ],
)
def test_no_plan_names_the_capacity_and_the_least_that_mends_it(hardware, tier, key):
    m, w = model(16), work()
    with pytest.raises(Infeasible) as none:
        solve(hardware, m, w)
    assert list(none.value.shortages) == [tier]
    short = none.value.shortages[tier]
    message = str(none.value)
    assert f"{tier.upper()} is short by" in message and f"hardware.{key}=" in message and "\n" not in message
    capacity = getattr(hardware, key)
    solve(replace(hardware, **{key: capacity + short + MB}), m, w)
    with pytest.raises(Infeasible):
        solve(replace(hardware, **{key: capacity + short - MB}), m, w)


@pytest.mark.parametrize("hardware", [machine(vram=GB, dram=GB), machine(vram=0, dram=GB)])
def test_a_full_disk_has_room_for_the_checkpoint_that_lies_there(hardware):
    m, w, full = replace(model(16), checkpoint="/data/small"), work(), replace(hardware, ssd_bytes=0)
    assert solve(full, m, w) == solve(hardware, m, w)
    assert predict(full, m, w, solve(full, m, w)).ssd_bytes == m.weight_bytes, "what lies there, however long it has"


def test_kv_that_streams_is_offered_first_where_it_makes_a_plan_fit() -> None:
    long, small = work(prompt_tokens=65536), machine(vram=1400 * MB)
    m = replace(model(16), kv_width=256)
    with pytest.raises(Infeasible, match=r"\); set workload.kv_spill=true or set workload.prompt_tokens=\d+ or raise to hardware.vram"):
        solve(small, m, long)
    assert solve(small, m, replace(long, kv_spill=True)).kv.vram_pages < solve(machine(), m, long).kv.vram_pages
    for unable, w in ((replace(small, ssd_write_gbps=0.0), long), (machine(vram=300 * MB), work())):
        with pytest.raises(Infeasible) as none:
            solve(unable, m, w)
        assert "kv_spill" not in str(none.value)


def test_where_only_the_weights_find_no_room_a_checkpoint_that_exists_is_offered():
    with pytest.raises(Infeasible, match="; set model=hf model.checkpoint=DIR"):
        solve(machine(ssd=GB), model(16), work())
    exists, small = replace(model(16), checkpoint="/data/small"), machine(vram=300 * MB)
    for m, hardware in ((model(16), replace(small, ssd_bytes=GB)), (exists, small)):
        with pytest.raises(Infeasible) as none:
            solve(hardware, m, work())
        assert "model.checkpoint" not in str(none.value)


def test_beside_a_checkpoint_the_ssd_is_short_by_spilled_kv_alone():
    m, w = replace(model(8, table=4 * MB), checkpoint="/data/small"), work(batch=32, prompt_tokens=4096, kv_spill=True)
    hardware = machine(vram=0, dram=1900 * MB)
    plan = solve(hardware, m, w)
    need = ssd_need(hardware, m, w, plan)
    assert need == {"weights": 0, "kv": plan.kv.ssd_pages * kv_page_bytes(m, plan.kv.page_tokens), "kv_reuse": 0} and need["kv"] > 0
    with pytest.raises(Infeasible) as none:
        solve(replace(hardware, ssd_bytes=0), m, w)
    assert list(none.value.shortages) == [Tier.ssd]
    mended = replace(hardware, ssd_bytes=none.value.shortages[Tier.ssd] + MB)
    assert broken_rules(mended, m, w, solve(mended, m, w)) == []
    assert none.value.shortages[Tier.ssd] <= need["kv"] < m.weight_bytes


def test_a_smaller_batch_is_offered_where_it_fits():
    hardware, m = machine(vram=GB), model(16)
    with pytest.raises(Infeasible) as none:
        solve(hardware, m, work(batch=64))
    offered = int(str(none.value).split("workload.batch=")[1].split()[0])
    solve(hardware, m, work(batch=offered))
    with pytest.raises(Infeasible):
        solve(hardware, m, work(batch=2 * offered))


def test_a_forced_value_that_does_not_fit_is_offered_to_be_dropped():
    with pytest.raises(Infeasible, match="drop force.resident_ffn"):
        solve(STREAMING, model(16), work(), Force(resident_ffn=16))


def test_throughput_chooses_the_best_batch_of_all():
    w = work(objective=Objective.throughput, batch=0, requests=16)
    hardware, m = machine(vram=GB, dram=2 * GB), model(16)
    best = search(hardware, m, w)
    each = {}
    for batch in (1, 2, 4, 8, 16):
        try:
            each[batch] = search(hardware, m, replace(w, batch=batch)).best_s
        except Infeasible:
            continue
    assert best.best_s == pytest.approx(min(each.values()), rel=1e-6)
    assert each[best.decisions.batch] == min(each.values())


def test_batch_zero_needs_the_throughput_objective():
    with pytest.raises(UserError, match="workload.batch=0"):
        solve(STREAMING, model(), work(batch=0))


def test_time_to_first_token_does_not_forget_decode():
    w = work(objective=Objective.ttft, prompt_tokens=8192)
    hardware, m = machine(vram=0, dram=4 * GB), model(16)
    predicted = predict(hardware, m, w, solve(hardware, m, w))
    assert predicted.bottleneck_prefill in (Resource.card, Resource.cpu) and predicted.bottleneck_decode in (Resource.card, Resource.cpu)


def test_the_same_question_has_the_same_answer():
    assert solve(STREAMING, model(16), work()) == solve(STREAMING, model(16), work())


def test_force_applied_to_a_plan_moves_what_follows_along():
    d = solve(STREAMING, model(16), work())
    changed = Force(cap_layers=1, block_bytes=2**16, queue_depth=4, page_tokens=16).apply(d, 16)
    assert changed.weights.dram.hwm_layers - 1 == d.weights.dram.hwm_layers - d.weights.dram.cap_layers
    assert changed.weights.dram.resident_layers == 1
    assert changed.weights.ssd.staging_bytes == 4 * 2**16
    assert broken_rules(STREAMING, model(16), work(), changed) == []


def test_applying_nothing_changes_nothing():
    d = solve(STREAMING, model(16), work())
    assert Force().apply(d, 16) == d


@pytest.mark.parametrize(
    ("layer_mb", "fastest", "in_flight_mb"),
    [(12, 7.0, 16), (12, 9.0, 128), (80, 9.0, 128)],
    ids=["small layers, almost as fast", "small layers, much slower", "large layers"],
)
def test_small_layers_are_read_one_after_the_other_where_that_is_almost_as_fast(layer_mb: int, fastest: float, in_flight_mb: int) -> None:
    """What is read of all slots at once arrives at once, and the drive idles while the first layer is computed."""
    points = tuple(SsdPoint(block, depth, rate) for block, depth, rate in ((2**22, 4, 6.5), (2**24, 8, fastest)))
    hardware = machine(vram=0, dram=GB, ssd_read=points)
    found = ssd_menu(hardware, model(attn=layer_mb * MB // 4, ffn=layer_mb * MB * 3 // 4), Force())
    assert max(choice.staging_bytes for choice in found) == in_flight_mb * 2**20
