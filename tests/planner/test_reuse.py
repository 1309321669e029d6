"""KV kept for prompts to come: what a prompt finds, what restoring it costs, and where the program keeps it."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.bills.reuse import KeptSet, held, kept_set, restoring
from penstock.planner.contract.decided.decisions import KvPages, KvReuse, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import SsdPoint
from penstock.planner.contract.given.workload import Objective
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import arena_bytes, dram_use, vram_use
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.prices.sizes import kept_file_bytes, kept_file_pages, kept_page_bytes
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.solver.infeasible import Infeasible
from penstock.planner.solver.program import search, solve
from tests.planner.small import GB, MB, gpu, machine, model, work
from tests.planner.test_program_properties import SLOWER, every_decision, machines, models

SMALL_PAGES = Force(page_tokens=64)
SHARED = {"prompt_tokens": 2000, "shared_prefix_tokens": 1600, "kept_tokens": 1600}


def wide(layers=8, kv_width=8192, **sizes):
    """A model whose KV is large beside its weights, so that pages compete with them."""
    return replace(model(layers, **sizes), kv_width=kv_width)


def keep(decisions, vram=0, dram=0, ssd_pages=0, m=None):
    ssd = kept_file_bytes(m, decisions.kv.page_tokens, ssd_pages) if ssd_pages else 0
    return replace(decisions, kv=replace(decisions.kv, reuse=KvReuse(vram, dram, ssd)))


def plan_of(hardware, m, w, force=None):
    decisions = solve(hardware, m, w, force)
    return Plan(hardware, m, w, decisions, predict(hardware, m, w, decisions))


@given(st.integers(0, 40), st.integers(0, 300), st.integers(1, 9))
def test_the_fewest_pages_that_are_needed_restore_as_much_as_was_asked(prefix, pages, prefixes):
    kept = KeptSet(64, prefix, pages, prefixes)
    for wanted in range(prefix + 1):
        needed = kept.needed(wanted)
        assert kept.restored_tokens(needed) == wanted * 64
        assert not needed or kept.restored_tokens(needed - 1) < wanted * 64


@pytest.mark.parametrize(
    "change, found",
    [
        ({}, KeptSet(64, 25, 25, 1)),
        ({"kept_tokens": 16000}, KeptSet(64, 25, 250, 10)),
        ({"kept_tokens": 800}, KeptSet(64, 25, 12, 1)),
        ({"kept_tokens": 0}, KeptSet(64, 0, 0, 0)),
        ({"shared_prefix_tokens": 0}, KeptSet(64, 0, 25, 0)),
        ({"shared_prefix_tokens": 63}, KeptSet(64, 0, 0, 26)),
        ({"shared_prefix_tokens": 1600, "prompt_tokens": 1600}, KeptSet(64, 24, 24, 1)),
    ],
)
def test_the_set_is_counted_in_full_pages_and_a_prompts_last_token_is_computed(change, found):
    assert kept_set(work(**SHARED | change), 64) == found


def test_a_page_that_several_sequences_begin_with_is_moved_once():
    kept = kept_set(work(**SHARED | {"kept_tokens": 3200}), 64)
    assert (kept.moved(1), kept.moved(2), kept.moved(8)) == (0.5, 1, 1)


@given(st.integers(1, 10**6))
def test_files_hold_the_pages_that_they_were_sized_for_and_no_more(pages):
    m, nbytes = wide(), kept_file_bytes(wide(), 64, pages)
    assert kept_file_pages(m, KvPages(64, 0, 0, 0, KvReuse(0, 0, nbytes))) == pages
    assert kept_file_pages(m, KvPages(64, 0, 0, 0, KvReuse(0, 0, nbytes - 1))) == pages - 1


def test_each_tier_is_as_slow_as_its_slowest_link():
    curve = Curve(((2**20, 10.0), (2**26, 50.0)))
    hardware = machine(gpu=gpu(h2d=curve))
    m = wide()
    rates = restoring(hardware, m, 64, 8)
    assert rates.page_bytes == kept_page_bytes(m, 64) == 64 * m.kv_bytes_per_token
    page_gb = rates.page_bytes / GB
    assert rates.seconds({Tier.vram: 10}) == 0, "its slots are shared"
    assert rates.seconds({Tier.dram: 10}) == pytest.approx(10 * page_gb / curve.at(rates.page_bytes))
    assert rates.seconds({Tier.ssd: 10}) == pytest.approx(10 * page_gb / 7.0)
    assert rates.seconds({Tier.dram: 100, Tier.ssd: 1}) == pytest.approx(101 * page_gb / curve.at(rates.page_bytes))
    on_cpu = restoring(machine(vram=0), m, 64, 8)
    assert on_cpu.seconds({Tier.dram: 10}) == pytest.approx(10 * page_gb / 40.0)


def test_what_comes_back_passes_the_bus_once_a_link_and_twice_where_dram_is_copied():
    pages, m = {Tier.dram: 100, Tier.ssd: 10}, wide()
    page_gb = kept_page_bytes(m, 64) / GB
    on_card, on_cpu = (restoring(machine(vram=vram, dram_bus_gbps=10.0), m, 64, 8) for vram in (GB, 0))
    assert on_card.bill(pages).of(Resource.dram) == pytest.approx(120 * page_gb / 10.0)
    assert on_cpu.bill(pages).of(Resource.dram) == pytest.approx(230 * page_gb / 10.0)


def test_where_the_link_binds_a_prefill_of_one_pass_nothing_is_restored():
    hardware = machine(vram=GB, dram=64 * GB, gpu=gpu(dense_tflops=1e6, attention_tflops=1e6, memory_gbps=1e6))
    plan = plan_of(hardware, model(16), work(**SHARED, objective=Objective.latency), Force(vram_ffn_slots=0))
    assert plan.prediction.bottleneck_prefill == "h2d" and plan.decisions.prefill_chunk_tokens == 2000
    assert (plan.break_even.vram, plan.break_even.dram, plan.break_even.ssd) == (None, None, None)
    assert plan.decisions.kv.reuse == KvReuse() and plan.prediction.restored_tokens == 0


def test_whole_passes_over_streamed_weights_are_saved():
    hardware = machine(vram=GB, dram=64 * GB, gpu=gpu(dense_tflops=1e6, attention_tflops=1e6, memory_gbps=1e6))
    m = model(16)
    plan = plan_of(hardware, m, work(**SHARED), Force(prefill_chunk_tokens=400, page_tokens=64, vram_ffn_slots=0))
    assert plan.break_even.dram == 448, "seven pages leave four passes of five"
    assert plan.prediction.restored_tokens == 1600
    none = predict(hardware, m, plan.workload, keep(plan.decisions))
    assert plan.prediction.prefill_stages["h2d"] == pytest.approx(none.prefill_stages["h2d"] / 5)
    assert plan.prediction.prefill_s == pytest.approx(plan.prediction.restore_s + max(plan.prediction.prefill_stages.values()))


def test_where_compute_binds_a_prefill_the_first_page_pays():
    plan = plan_of(machine(), model(8), work(**SHARED), SMALL_PAGES)
    assert plan.break_even.vram == plan.break_even.dram == 64
    assert plan.prediction.restored_tokens == 1600 and plan.prediction.bottleneck_prefill == "card"


def test_a_drive_that_is_too_slow_never_pays_and_keeps_nothing():
    slow = machine(ssd_read=(SsdPoint(2**22, 4, 0.001),))
    plan = plan_of(slow, wide(4), work(**SHARED), SMALL_PAGES)
    assert plan.break_even.ssd is None and plan.break_even.dram is not None
    reuse = plan.decisions.kv.reuse
    assert reuse.vram_pages + reuse.dram_pages == 25, "copies for a later process cost no time"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_break_even_is_the_first_length_that_the_prediction_restores(data):
    """The scan asks the prediction of a plan that keeps exactly one prefix of each length, in one tier."""
    m = replace(data.draw(models(2, 6)), kv_width=data.draw(st.sampled_from([256, 4096, 16384])))
    hardware = data.draw(machines(m))
    tokens = data.draw(st.integers(2, 1500))
    w = work(prompt_tokens=tokens, batch=data.draw(st.sampled_from([1, 3])))
    force = Force(page_tokens=64, prefill_chunk_tokens=data.draw(st.sampled_from([None, 100, 512])))
    try:
        plan = plan_of(hardware, m, w, force)
    except Infeasible:
        assume(False)
    for tier in Tier:
        assert plan.break_even.of(tier) == next((n * 64 for n in range(1, 30) if restores(plan, tier, n)), None), tier


def restores(plan, tier, pages):
    """Whether a prediction restores ``pages`` of every prompt, which each has of its own, from ``tier``."""
    prefixes = plan.decisions.batch
    alone = replace(plan.workload, shared_prefix_tokens=pages * 64, kept_tokens=prefixes * pages * 64)
    if pages * 64 >= alone.prompt_tokens or (tier is Tier.vram and not plan.hardware.gpu):
        return False
    count = {"vram": 0, "dram": 0, "ssd_pages": 0} | {"ssd_pages" if tier is Tier.ssd else str(tier): prefixes * pages}
    return predict(plan.hardware, plan.model, alone, keep(plan.decisions, **count, m=plan.model)).restored_tokens == pages * 64


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_a_hit_is_never_predicted_slower_than_computing(data):
    m = replace(data.draw(models(2, 6)), kv_width=data.draw(st.sampled_from([256, 4096, 16384])))
    hardware = data.draw(machines(m))
    kept_tokens, batch = data.draw(st.integers(1, 3000)), data.draw(st.sampled_from([1, 3]))
    w = work(prompt_tokens=900, shared_prefix_tokens=700, kept_tokens=kept_tokens, batch=batch)
    try:
        decisions = solve(hardware, m, replace(w, kept_tokens=0), SMALL_PAGES)
    except Infeasible:
        assume(False)
    pages = st.integers(0, 50)
    kept = keep(decisions, data.draw(pages) if hardware.gpu else 0, data.draw(pages), data.draw(pages), m)
    assert predict(hardware, m, w, kept).prefill_s <= predict(hardware, m, w, decisions).prefill_s


def every_reuse(hardware, m, decisions, pages):
    """All ways to keep up to ``pages`` pages."""
    for vram, dram, ssd in product(range(pages + 1 if hardware.gpu else 1), range(pages + 1), range(pages + 1)):
        if vram + dram <= pages:
            yield keep(decisions, vram, dram, ssd, m)


def brute_force(hardware, m, w, base):
    best = float("inf")
    pages = kept_set(w, base.kv.page_tokens).pages
    for decisions in every_decision(hardware, m, w, keep(base)):
        if decisions.prefill_chunk_tokens != base.prefill_chunk_tokens or broken_rules(hardware, m, w, decisions):
            continue
        for kept in every_reuse(hardware, m, decisions, pages):
            if not broken_rules(hardware, m, w, kept):
                best = min(best, predict(hardware, m, w, kept).total_s)
    return best


def tight(rng, on_gpu):
    """A model of a few layers whose pages are as large as its units, and a machine that lacks room for some of both: with a GPU for units
    and pages in VRAM and for pages in DRAM, without one for layers and pages in DRAM."""
    m = model(2 if on_gpu else rng.choice([5, 6]), rng.randint(5, 30) * MB, rng.randint(20, 60) * MB, 10 * MB)
    m = replace(m, kv_width=16384 if on_gpu else 32768)
    link = rng.uniform(0.2, 2)
    fast = {"dense_tflops": 1e5, "attention_tflops": 1e5, "memory_gbps": 1e4} if rng.random() < 0.7 else {}
    bus = rng.choice([0.0, rng.uniform(0.5, 3) * link])
    card = gpu(h2d=Curve(((2**20, link), (2**26, 1.5 * link))), **fast)
    reads = tuple(SsdPoint(block, 8, rng.uniform(0.2, 3)) for block in ((2**22,) if on_gpu else (2**22, 2**23)))
    roomy = machine(4 * GB if on_gpu else 0, ssd_read=reads, cpu_matvec_gbps=100.0, cpu_dense_tflops=rng.choice([0.5, 50.0]))
    w = work(
        batch=rng.choice([1, 1, 2]),
        prompt_tokens=rng.randint(261, 500),
        new_tokens=rng.choice([1, 1, 30]),
        objective=rng.choice(list(Objective)),
        shared_prefix_tokens=rng.choice([130, 200, 260]),
    )
    w = replace(w, kept_tokens=w.shared_prefix_tokens * (1 if on_gpu else rng.choice([1, 1, 2])))
    hardware = replace(roomy, gpu=card if on_gpu else None, layer_launch_s=1e-6, dram_bus_gbps=bus)
    force = SMALL_PAGES.but(prefill_chunk_tokens=rng.choice([64, 100, w.prompt_tokens]))
    force = force.but(vram_slots=2, vram_prefetch_distance=0) if on_gpu else force
    decisions = solve(hardware, m, replace(w, kept_tokens=0), force)
    vram, dram = (use(hardware, m, w, decisions) for use in (vram_use, dram_use))
    spare = 3 * kept_page_bytes(m, 64)
    if on_gpu:
        streams, weights = m.attn_max + m.ffn_max, vram["residents"] + vram["embedding"]
        room = sum(vram.values()) - weights + streams + int(rng.random() * (weights - streams + spare))
        hardware = replace(hardware, vram_bytes=room)
        return replace(hardware, dram_bytes=sum(dram.values()) + m.weight_bytes + int(rng.random() * spare)), m, w, force
    return replace(hardware, dram_bytes=sum(dram.values()) + int((rng.random() - 0.4) * (m.weight_bytes + spare))), m, w, force


ON_GPU = (8, 11, 13, 20, 23, 42, 46, 53, 58, 61)
"""Between them these keep nothing, in VRAM, in DRAM and in both, with a copy on the SSD."""


@pytest.mark.parametrize("on_gpu, seed", [(True, seed) for seed in ON_GPU] + [(False, seed) for seed in range(10)])
def test_the_program_keeps_as_brute_force_would(on_gpu, seed):
    hardware, m, w, passes = tight(Random(seed), on_gpu)
    try:
        found = search(hardware, m, w, passes)
    except Infeasible:
        with pytest.raises(Infeasible):
            search(hardware, m, replace(w, kept_tokens=0), passes)
        return
    best = brute_force(hardware, m, w, found.decisions)
    assert found.best_s == pytest.approx(best, rel=1e-5)
    assert predict(hardware, m, w, found.decisions).total_s <= best * SLOWER
    assert broken_rules(hardware, m, w, found.decisions) == []


@pytest.mark.parametrize("hardware", [machine(vram=GB, dram=2 * GB), machine(vram=0, dram=2 * GB), machine()])
@pytest.mark.parametrize("objective", list(Objective))
def test_without_a_set_to_keep_a_shared_prefix_changes_nothing(hardware, objective):
    asked = work(prompt_tokens=2000, objective=objective)
    plain, shared = (search(hardware, model(12), w) for w in (asked, replace(asked, shared_prefix_tokens=1600)))
    assert plain == shared and plain.decisions.kv.reuse == KvReuse()


def test_idle_memory_holds_what_is_worth_keeping_and_the_ssd_a_copy_of_all():
    hardware, m, w = machine(vram=0, dram=8 * GB), wide(8), work(**SHARED | {"kept_tokens": 16000})
    decisions = solve(hardware, m, w)
    kept = kept_set(w, decisions.kv.page_tokens)
    assert held(m, decisions.kv, kept) == {Tier.vram: 0, Tier.dram: kept.pages, Tier.ssd: 0}
    assert kept_file_pages(m, decisions.kv) == kept.pages


def test_on_a_full_disk_nothing_is_kept_and_beside_a_checkpoint_only_what_is_kept_needs_room():
    hardware, m, w = machine(vram=0, dram=8 * GB), replace(wide(8), checkpoint="/data/small"), work(**SHARED | {"kept_tokens": 16000})
    roomy, full = solve(hardware, m, w).kv.reuse, solve(replace(hardware, ssd_bytes=0), m, w).kv.reuse
    assert full.ssd_bytes == 0 < roomy.ssd_bytes and full.dram_pages == roomy.dram_pages > 0
    assert solve(replace(hardware, ssd_bytes=roomy.ssd_bytes + 4096), m, w).kv.reuse == roomy


def test_what_finds_no_room_in_memory_lies_on_the_ssd():
    m, w = wide(8, attn=4 * MB, ffn=12 * MB, table=4 * MB), work(**SHARED | {"kept_tokens": 16000})
    needed = sum(dram_use(machine(vram=0), m, w, keep(solve(machine(vram=0), m, w))).values())
    hardware = machine(vram=0, dram=needed + 700 * MB)
    decisions = solve(hardware, m, w)
    kept = kept_set(w, decisions.kv.page_tokens)
    pages = held(m, decisions.kv, kept)
    assert sum(pages.values()) == kept.pages and pages[Tier.ssd] > 0
    idle = hardware.dram_bytes - sum(dram_use(hardware, m, w, decisions).values())
    assert pages[Tier.dram] > 0 and 0 <= idle < kept_page_bytes(m, decisions.kv.page_tokens)
    full = solve(replace(hardware, ssd_bytes=m.weight_bytes + 4096), m, w)
    assert full.kv.reuse.ssd_bytes == 0 < full.kv.reuse.dram_pages < kept.pages
    assert 0 < predict(hardware, m, w, full).restored_tokens < kept.prefix_pages * decisions.kv.page_tokens


def test_pages_without_a_prefix_to_find_them_by_fill_what_is_idle():
    hardware, m, w = machine(vram=0, dram=8 * GB), wide(8), work(prompt_tokens=2000, kept_tokens=4000)
    decisions = solve(hardware, m, w)
    assert decisions.kv.reuse.dram_pages == 4000 // decisions.kv.page_tokens
    assert predict(hardware, m, w, decisions).restored_tokens == 0


def test_a_prompt_that_finds_nothing_takes_no_more_passes_than_in_a_plan_that_keeps_nothing():
    hardware, m, w = machine(vram=GB, dram=GB), model(16), work(**SHARED)
    assert solve(hardware, m, w).prefill_chunk_tokens == solve(hardware, m, replace(w, kept_tokens=0)).prefill_chunk_tokens


def test_throughput_chooses_the_best_batch_with_reuse_in_mind():
    w = work(**SHARED, objective=Objective.throughput, batch=0, requests=8)
    hardware, m = machine(vram=GB, dram=2 * GB), wide(8, 1024)
    each = {batch: search(hardware, m, replace(w, batch=batch)).best_s for batch in (1, 2, 4)}
    found = search(hardware, m, w)
    assert found.best_s <= min(each.values()) * (1 + 1e-6) and predict(hardware, m, w, found.decisions).restored_tokens > 0


def test_kept_pages_and_the_block_that_they_pass_through_are_counted():
    hardware, m = machine(), wide(4)
    decisions = solve(hardware, m, work())
    page = kept_page_bytes(m, decisions.kv.page_tokens)

    def use(reuse):
        kept = replace(decisions, kv=replace(decisions.kv, reuse=reuse))
        vram, dram = vram_use(hardware, m, work(), kept), dram_use(hardware, m, work(), kept)
        return vram["kv_reuse"], vram["kv_bounce"], dram["kv_reuse"], arena_bytes(hardware, m, kept) - arena_bytes(hardware, m, decisions)

    assert use(KvReuse(3, 0, 0)) == (3 * page, 0, 0, 0)
    assert use(KvReuse(3, 5, 0)) == (3 * page, 2 * page, 5 * page, 5 * page)
    assert use(KvReuse(0, 0, GB)) == (0, 2 * page, 0, 0)


def test_no_plan_is_lost_to_a_set_that_does_not_fit():
    w = work(**SHARED | {"kept_tokens": 10**9})
    with pytest.raises(Infeasible) as none:
        solve(machine(vram=300 * MB), model(16), w, SMALL_PAGES)
    with pytest.raises(Infeasible) as without:
        solve(machine(vram=300 * MB), model(16), replace(w, kept_tokens=0), SMALL_PAGES)
    assert none.value.shortages == pytest.approx(without.value.shortages, rel=1e-6)
    assert solve(machine(vram=GB), model(16), w).kv.reuse != KvReuse()


def test_pages_that_are_too_large_to_fit_are_offered_to_be_small_again():
    m, w = model(16), work(**SHARED)
    with pytest.raises(Infeasible) as none:
        solve(machine(vram=300 * MB), m, replace(w, kept_tokens=0))
    hardware = machine(vram=300 * MB + none.value.shortages[Tier.vram] + MB)
    with pytest.raises(Infeasible, match="set workload.kept_tokens=0"):
        solve(hardware, m, w)
    solve(hardware, m, replace(w, kept_tokens=0))


def test_forced_page_sizes_take_the_kept_tokens_along():
    decisions = keep(solve(machine(), model(), work(), SMALL_PAGES), 4, 9)
    assert Force(page_tokens=128).apply(decisions, 8).kv.reuse == KvReuse(2, 4, 0)
