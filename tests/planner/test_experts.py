"""Routed experts in a plan: the curve of hits, what slots keep, what a pass still moves and how long that takes."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.common.measures import align_up
from penstock.planner.contract.bills.cost import load_s, predict
from penstock.planner.contract.bills.prefill import Moved
from penstock.planner.contract.bills.routed import PAUSE_AT, Routed, behind_last
from penstock.planner.contract.config.config_schema import ForceConfig, MoeConfig
from penstock.planner.contract.decided.decisions import ExpertPolicyName, ExpertSlots, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.experts.expert_hits import default_hit_rates, flaw
from penstock.planner.contract.experts.expert_misses import misses, visit
from penstock.planner.contract.experts.expert_slots import fewest_slots, kept_in_all, kept_slots
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import SsdPoint
from penstock.planner.contract.given.model import Experts
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.launches import asked_issue_s, issue_s
from penstock.planner.contract.prices.memory_law import arena_bytes, dram_use, vram_use
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.prices.sizes import activation_bytes, expert_dram_bytes, expert_vram_bytes
from penstock.planner.contract.prices.stages import answer_s, decode_compute_s, expert_copy_s, ssd_gbps, weight_read_s
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.simulate.act import Simulation
from penstock.planner.solver.notes.expert_notes import expert_notes
from penstock.planner.solver.program import search, solve
from penstock.planner.solver.terms.menu import expert_chunk_bytes
from tests.planner.small import GB, MB, blocks, gpu, machine, model, with_units, work

MIXTRAL = Experts(8, 2, 352_321_536, tuple(range(32)), default_hit_rates(8, 2))
QWEN = Experts(128, 8, 9_437_184, tuple(range(48)), default_hit_rates(128, 8))


def moe(layers: int = 8, experts: int = 8, **change):
    """Experts of 15 MB: 120 MB a layer."""
    return model(layers, experts=experts, **change)


def with_slots(made, vram, dram):
    return replace(made, experts=replace(made.experts, vram_slots=vram, dram_slots=dram))


class TestCurve:
    def test_the_default_holds_the_known_figures(self):
        rates = default_hit_rates(8, 2)
        assert (rates[2], rates[4]) == (0.478, 0.735) and (rates[0], rates[8]) == (0.0, 1.0)
        lru = default_hit_rates(8, 2, ExpertPolicyName.lru)
        assert (lru[2], lru[4]) == (0.374, 0.614)

    @given(st.integers(1, 256), st.data())
    def test_the_default_of_any_model_is_a_curve_and_finds_no_more_than_there_are_slots(self, count, data):
        top_k = data.draw(st.integers(1, count))
        rates = default_hit_rates(count, top_k)
        assert not flaw(rates, count)
        assert all(rate * top_k <= n + 1e-9 for n, rate in enumerate(rates))

    @pytest.mark.parametrize(
        "rates, says",
        [
            ((0.0, 1.0), "2 figures; allowed: 5"),
            ((0.1, 0.4, 0.6, 0.8, 1.0), "0.1 with no slot"),
            ((0.0, 0.5, 0.4, 0.8, 1.0), "0.4 with 2 slots, 0.5 with 1"),
            ((0.0, 0.1, 0.5, 0.8, 1.0), "slot 2 finds 0.4 more"),
        ],
    )
    def test_what_is_no_curve_is_told(self, rates, says):
        assert says in flaw(rates, 4)


class TestMisses:
    @pytest.mark.parametrize("experts", [MIXTRAL, QWEN])
    def test_one_token_misses_what_the_curve_does_not_find(self, experts):
        one = visit(experts, 1)
        for n, rate in enumerate(experts.hit_rates):
            assert one.missed(n) == pytest.approx(experts.top_k * (1 - rate), abs=1e-9)
        between = (experts.hit_rates[2] + experts.hit_rates[3]) / 2
        assert one.missed(2.5) == pytest.approx(experts.top_k * (1 - between))

    @pytest.mark.parametrize("experts", [MIXTRAL, QWEN])
    def test_a_pass_over_many_tokens_misses_all_that_is_not_kept(self, experts):
        assert visit(experts, 4096).missed(3) == pytest.approx(experts.count - 3) and visit(experts, 4096).dense

    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 64), st.data())
    def test_more_slots_never_miss_more_and_all_miss_none(self, tokens, data):
        experts = data.draw(st.sampled_from([MIXTRAL, QWEN]))
        one = visit(experts, tokens)
        kept = sorted(data.draw(st.tuples(st.floats(0, experts.count), st.floats(0, experts.count))))
        assert one.missed(kept[1]) <= one.missed(kept[0]) <= one.touched
        assert one.touched - one.missed(kept[1]) <= kept[1] + 1e-9, "no more are found than are kept"
        assert one.missed(experts.count) == pytest.approx(0, abs=1e-9)

    def test_the_ssd_reads_nothing_where_dram_keeps_all_and_nothing_moves_where_vram_does(self):
        m = moe()
        assert misses(m, ExpertSlots(10, 64), 1, True).dram == 0 < misses(m, ExpertSlots(10, 64), 1, True).vram
        assert misses(m, ExpertSlots(64, 0), 1, True) == misses(model(), None, 1, True)
        assert misses(m, ExpertSlots(0, 10), 1, False).vram == 0 < misses(m, ExpertSlots(0, 10), 1, False).dram

    def test_two_tiers_keep_more_than_the_larger_and_less_than_both(self):
        m, kept = moe(), 8 * 3
        two = misses(m, ExpertSlots(kept + 3, kept + 3), 1, True).dram
        alone, both = (8 * visit(m.experts, 1).missed(n) for n in (3, 6))
        assert both < two < alone

    def test_a_second_tier_adds_to_one_token_what_the_model_says_and_to_a_pass_over_many_what_is_always_taken(self):
        m, slots = moe(), ExpertSlots(8 * 2 + 3, 8 * 4 + 3)
        nothing, all_of_it = (replace(m, routers=replace(m.routers, second_tier=weight, alone=1.0)) for weight in (0.0, 1.0))
        one = visit(m.experts, 1)
        assert misses(nothing, slots, 1, True).dram == pytest.approx(8 * one.missed(4))
        assert misses(m, slots, 1, True).dram == pytest.approx(8 * one.missed(5.5)), "three quarters, where no routings are given"
        assert misses(all_of_it, slots, 1, True).dram == pytest.approx(8 * one.missed(6))
        assert misses(nothing, slots, 512, True) == misses(all_of_it, slots, 512, True), "a prompt uses all experts"


class TestSlots:
    def test_transit_slots_keep_nothing_and_a_slot_for_each_needs_none(self):
        experts = moe().experts
        assert kept_in_all(experts, 63) == 60 and kept_in_all(experts, 64) == 64
        assert sum(kept_slots(experts, 30).values()) == 27 and set(kept_slots(experts, 30).values()) == {3, 4}
        assert fewest_slots(experts) == 3 and fewest_slots(QWEN) == 8

    def test_each_slot_takes_its_experts_bytes_in_whole_pages(self):
        m, hardware = moe(), machine(vram=GB, dram=2 * GB)
        made = solve(hardware, m, work())
        more = with_slots(made, made.experts.vram_slots - 1, made.experts.dram_slots - 1)
        vram, dram = (use(hardware, m, work(), made)["experts"] - use(hardware, m, work(), more)["experts"] for use in (vram_use, dram_use))
        assert vram == align_up(15 * MB) + 2 * 4096 == expert_vram_bytes(m.experts)
        assert dram == expert_dram_bytes(m.experts) >= align_up(15 * MB) + 3 * 2 * 4096, "three tensors, each with a page at either end"
        assert arena_bytes(hardware, m, made) - arena_bytes(hardware, m, more) == dram

    def test_activations_are_those_of_one_expert_at_a_time(self):
        m = replace(moe(), hidden=1000, ffn_width=2000, attn_width=1, kv_width=1, vocab=1)
        computing, summing = 5 * 1000 * 2, (2 + 1) * 1000 * 4 + 1000 * 2
        per_token = 4 * 1000 * 2 + 2 * 1000 * 2 + max(computing, summing) + 2 * 8
        grown = [activation_bytes(m, work(prompt_tokens=tokens), 1, tokens) for tokens in (1000, 2000)]
        assert grown[1] - grown[0] == pytest.approx(1000 * per_token, rel=1e-3)

    def test_experts_kept_at_start_are_loaded(self):
        m, hardware = moe(), machine(vram=0, dram=1100 * MB, cpu_matvec_gbps=1e4, cpu_dense_tflops=1e3)
        made = solve(hardware, m, work())
        fewer = with_slots(made, 0, made.experts.dram_slots - 10)
        rate = ssd_gbps(hardware, made.weights.ssd.block_bytes, made.weights.ssd.queue_depth) * GB
        assert load_s(hardware, m, work(), made) - load_s(hardware, m, work(), fewer) == pytest.approx(10 * 15 * MB / rate)

    def test_slots_on_a_card_are_filled_with_experts_that_dram_does_not_read(self):
        """As far as there are any: then with what lies in DRAM, which costs no reads."""
        m, hardware = moe(), machine(vram=GB, dram=2 * GB, ssd_read=(SsdPoint(2**22, 4, 0.5),))
        made = solve(hardware, m, work())
        rate = ssd_gbps(hardware, made.weights.ssd.block_bytes, made.weights.ssd.queue_depth) * GB
        few, more, most = (load_s(hardware, m, work(), with_slots(made, *slots)) for slots in ((10, 20), (15, 20), (15, 30)))
        assert more - few == pytest.approx(5 * 15 * MB / rate) and most - more == pytest.approx(10 * 15 * MB / rate)
        full, over = (load_s(hardware, m, work(), with_slots(made, *slots)) for slots in ((35, 35), (45, 45)))
        assert full == pytest.approx(over) == load_s(hardware, m, work(), with_slots(made, 10, m.experts.units)), "each once"
        none = load_s(hardware, m, work(), with_slots(made, m.experts.units, 0))
        assert none == pytest.approx(load_s(hardware, m, work(), with_slots(made, 10, m.experts.units))), "DRAM keeps none: VRAM's own"


class TestTime:
    def test_a_step_at_batch_one_computes_and_then_waits_for_what_it_misses(self):
        m, hardware = moe(), machine(vram=GB)
        made = solve(hardware, m, work(), Force(resident_attn=8, resident_ffn=8, resident_head=2, embedding=Tier.vram))
        predicted = predict(hardware, m, work(), made)
        copy_s = expert_copy_s(hardware.gpu, m.experts, made.experts.chunk_bytes)
        missed = 8 * visit(m.experts, 1).missed(kept_in_all(m.experts, made.experts.vram_slots) / 8)
        compute_s = decode_compute_s(hardware, m, work(), 1)
        issued_s = (issue_s(hardware, m, 1) - weight_read_s(hardware, m, 1)) / 8
        odds = missed / 16
        waited_s = 2 * odds * (1 - odds) * max(0.0, copy_s - issued_s) + odds**2 * (2 * copy_s - issued_s)
        assert predicted.decode_stages["card"] == pytest.approx(compute_s) and issued_s > 0
        assert predicted.decode_stages["h2d"] == pytest.approx(missed * copy_s)
        assert predicted.decode_s_per_token == pytest.approx(compute_s + 8 * waited_s, rel=0.01) and waited_s > 0
        assert predicted.h2d_bytes_per_token == pytest.approx(missed * m.experts.expert_bytes, abs=1)
        assert predicted.experts_missed_vram == pytest.approx(missed / 16)

    def test_weights_that_stream_hide_behind_compute_only_while_no_expert_is_copied(self):
        m, hardware = moe(), machine(vram=GB, layer_launch_s=1e-6)
        stays = Force(resident_attn=8, resident_ffn=8, resident_head=2, embedding=Tier.vram, expert_vram_slots=16)
        made = [solve(hardware, m, work(), stays.but(resident_attn=attn)) for attn in (8, 7)]
        still, streams = (predict(hardware, m, work(), each) for each in made)
        copied_s = Moved.of(hardware, m, made[1]).units.of(Resource.h2d)
        routed = Routed.of(hardware, m, 1)
        assert streams.decode_s_per_token - still.decode_s_per_token == pytest.approx(routed.exposed * copied_s)
        assert 0 < routed.exposed < 1 and copied_s < still.decode_stages["card"]
        assert Routed.of(machine(), m, 1).exposed == 0, "where all experts fit, as in a dense model"

    def test_a_step_that_touches_every_expert_overlaps_compute_and_copies(self):
        m, hardware, w = moe(), machine(vram=GB), work(batch=64, prompt_tokens=64)
        predicted = predict(hardware, m, w, solve(hardware, m, w))
        assert predicted.h2d_bytes_per_token > 0 and Routed.of(hardware, m, 64).alone < 2e-3
        assert predicted.decode_s_per_token == pytest.approx(max(predicted.decode_stages.values()), rel=2e-3)

    def test_reads_and_copies_add_up_where_a_token_visits_few_experts(self):
        m, hardware = moe(), machine(vram=700 * MB, dram=900 * MB)
        made = solve(hardware, m, work(), Force(resident_attn=8, resident_ffn=8))
        predicted = predict(hardware, m, work(), made)
        assert 0 < predicted.experts_missed_dram < predicted.experts_missed_vram
        assert predicted.decode_s_per_token > predicted.decode_stages["cpu"] + predicted.decode_stages["ssd"]
        assert predicted.decode_s_per_token < sum(predicted.decode_stages.values())

    def test_a_layer_that_reads_waits_for_the_answer_of_an_idle_drive_and_for_the_host(self):
        """Once, whatever it reads: so it is simulated, and so plans count it."""
        m, made, steps, told = moe(), None, [], []
        for alone, launch_s in ((5.0, 2e-4), (0.5, 2e-4), (5.0, 4e-3)):
            points = tuple(SsdPoint(2**22, depth, rate) for depth, rate in ((1, alone), (8, 5.0)))
            hardware = machine(vram=700 * MB, dram=900 * MB, ssd_read=points, layer_launch_s=launch_s)
            made = made or solve(hardware, m, work(), Force(resident_attn=8, resident_ffn=8))
            told.append(predict(hardware, m, work(), made))
            steps.append(Simulation(Plan(hardware, m, work(), made, told[-1])).run().record.step_ns)
        ssd = made.weights.ssd
        late_s = answer_s(replace(hardware, ssd_read=(SsdPoint(2**22, 1, 0.5), points[1])), ssd.block_bytes, ssd.queue_depth, 15 * MB)
        assert late_s == pytest.approx(min(ssd.block_bytes, 15 * MB) / GB * (1 / 0.5 - 1 / 5.0))
        reading = 8 * (1 - (1 - told[0].experts_missed_dram) ** 2)
        assert told[1].decode_s_per_token - told[0].decode_s_per_token == pytest.approx(reading * late_s)
        longer = [(slow - quick) / 1e9 / late_s for quick, slow in zip(*steps[:2], strict=True)]
        assert 1 < fmean(longer) <= max(longer) <= 8, "visits of a step; what compute hides is not longer"
        assert 0 < asked_issue_s(hardware) == pytest.approx(20 * asked_issue_s(replace(hardware, layer_launch_s=2e-4)))
        assert asked_issue_s(replace(hardware, gpu=None)) == 0 == answer_s(machine(), 2**22, 8)

    def test_without_a_gpu_what_dram_misses_is_read_and_compute_goes_on_meanwhile(self):
        m, hardware = moe(), machine(vram=0, dram=900 * MB)
        made = solve(hardware, m, work())
        predicted = predict(hardware, m, work(), made)
        assert made.experts.vram_slots == 0 == predicted.h2d_bytes_per_token < predicted.ssd_bytes_per_token
        assert predicted.decode_s_per_token < predicted.decode_stages["cpu"] + predicted.decode_stages["ssd"]
        assert predicted.decode_s_per_token > max(predicted.decode_stages.values())

    def test_each_pass_of_a_prefill_moves_the_experts_that_are_not_kept(self):
        m, hardware = moe(), machine(vram=GB)
        made = solve(hardware, m, work(), Force(prefill_chunk_tokens=512, resident_attn=8, resident_ffn=8, resident_head=2))
        once = predict(hardware, m, work(), made)
        missed = 64 - kept_in_all(m.experts, made.experts.vram_slots)
        assert once.prefill_stages["h2d"] == pytest.approx(missed * expert_copy_s(hardware.gpu, m.experts, made.experts.chunk_bytes))
        twice = predict(hardware, m, work(), replace(made, prefill_chunk_tokens=256))
        assert twice.prefill_stages["h2d"] == pytest.approx(2 * once.prefill_stages["h2d"])


class TestProgram:
    def test_slots_are_bought_where_the_curve_pays(self):
        """A curve that finds everything with one slot a layer makes one slot a layer enough; the default's wants all that fit."""
        hardware, m = machine(vram=1200 * MB, dram=4 * GB), moe()
        steep = replace(m, routers=replace(m.routers, top_k=1, hit_rates=(0.0, *(1 - 1e-9 * (8 - n) for n in range(1, 9)))))
        least = solve(hardware, steep, work(new_tokens=20000))
        usual = solve(hardware, m, work(new_tokens=20000))
        assert least.experts.vram_slots == 8 + 3 < usual.experts.vram_slots

    def test_all_experts_in_vram_leave_nothing_to_copy_and_no_slots_in_dram(self):
        hardware, m = machine(), moe()
        made = solve(hardware, m, work())
        assert (made.experts.vram_slots, made.experts.dram_slots, made.experts.prefetch) == (64, 0, 0)
        predicted = predict(hardware, m, work(), made)
        assert (predicted.h2d_bytes_per_token, predicted.ssd_bytes_per_token) == (0, 0)

    def test_a_token_that_uses_all_experts_is_planned_as_if_they_were_dense(self):
        m = moe()
        m = replace(m, routers=replace(m.routers, top_k=8, hit_rates=default_hit_rates(8, 8)))
        hardware = machine(vram=GB)
        predicted = predict(hardware, m, work(), solve(hardware, m, work()))
        assert predicted.decode_s_per_token == max(predicted.decode_stages.values())

    def test_dram_has_a_slot_for_every_expert_where_it_has_room(self):
        made = solve(machine(vram=GB, dram=16 * GB), moe(), work())
        assert made.experts.dram_slots == 64 > made.experts.vram_slots

    def test_a_card_with_room_for_nothing_but_transit_has_a_plan(self):
        m = moe()
        least = solve(machine(vram=16 * GB), m, work(), Force(expert_vram_slots=3, resident_attn=0, resident_ffn=0, resident_head=0))
        need = sum(vram_use(machine(vram=16 * GB), m, work(), least).values())
        hardware = machine(vram=need + 2 * MB)
        assert broken_rules(hardware, m, work(), solve(hardware, m, work(), Force(expert_vram_slots=3))) == []

    @pytest.mark.parametrize("more", ["vram", "dram"])
    def test_more_memory_is_never_slower(self, more):
        m, before = moe(), float("inf")
        for nbytes in range(600 * MB, 2000 * MB, 100 * MB):
            hardware = machine(**{"vram": 900 * MB, "dram": 900 * MB} | {more: nbytes})
            found = search(hardware, m, work())
            assert found.best_s <= before * (1 + 1e-9)
            assert found.best_s * (1 - 1e-6) <= predict(hardware, m, work(), found.decisions).total_s <= found.best_s * 1.0051
            before = found.best_s

    def test_some_layers_of_experts_among_dense_ones(self):
        m = moe()
        dense = tuple(120 * MB if i < 2 else ffn for i, ffn in enumerate(m.ffn_bytes))
        m = with_units(m, *blocks(UnitKind.ffn, dense), *m.of_kind(UnitKind.expert)[2:])
        for hardware in (machine(vram=GB, dram=900 * MB), machine(vram=0, dram=900 * MB)):
            made = solve(hardware, m, work())
            assert broken_rules(hardware, m, work(), made) == [] and made.experts.dram_slots <= 48

    def test_a_card_that_holds_unequal_layers_to_the_byte_keeps_them_all(self):
        m = moe()
        m = with_units(m, *blocks(UnitKind.ffn, (120 * MB, *m.ffn_bytes[1:])), *m.of_kind(UnitKind.expert)[1:])
        roomy = solve(machine(), m, work())
        tight = machine(vram=sum(vram_use(machine(), m, work(), roomy).values()) + 2 * 4096)
        made = solve(tight, m, work())
        assert made.weights.vram.resident_units == roomy.weights.vram.resident_units and made.experts.vram_slots == 56

    def test_routers_stay_where_they_are_smaller_than_any_measured_copy(self):
        made = solve(machine(vram=450 * MB), moe(), work())
        assert made.weights.vram.resident_units.ffn == 8 > made.weights.vram.resident_units.attn

    def test_what_the_user_fixes_is_kept(self):
        moe_config = MoeConfig(policy=ExpertPolicyName.lru, prefetch=2, read_ahead=0, in_flight=1, chunk_bytes=2**22)
        force = Force.from_config(ForceConfig(expert_vram_slots=12, expert_dram_slots=40), moe_config)
        made = solve(machine(vram=GB), moe(), work(), force)
        assert made.experts == ExpertSlots(12, 40, ExpertPolicyName.lru, 2, 0, 1, 2**22)
        assert Force().apply(made, 8) == made and force.apply(made, 8) == made


class TestForesight:
    def plan(self, hardware, m=None, **force):
        m = m or moe()
        made = solve(hardware, m, work(), Force(**force))
        return Plan(hardware, m, work(), made, predict(hardware, m, work(), made))

    def test_an_expert_moves_in_the_smallest_chunks_at_the_links_full_rate_that_bridge_a_layer(self):
        card = gpu(h2d=Curve(((2**20, 10.0), (2**22, 20.0), (2**26, 20.1))))

        def chunk(launch_s: float, in_flight: int = 2, expert_bytes: int = 40 * MB, foreseen: float = 0.0) -> int:
            hardware, m = replace(machine(), gpu=card, layer_launch_s=launch_s), moe()
            m = with_units(replace(m, routers=replace(m.routers, foreseen=foreseen)), *blocks(UnitKind.expert, (expert_bytes,) * 8, 8))
            return expert_chunk_bytes(hardware, m, work(), 1, in_flight)

        assert chunk(1e-6) == 2**22 and chunk(1e-6, expert_bytes=5000) == 2**20
        assert chunk(1e-3) == 2**24  # 1.5 ms of an MoE layer at 20 GB/s, in two copies
        assert chunk(1e-3, in_flight=1) == chunk(1e-3, foreseen=0.8) == 2**25

    def test_nothing_is_fetched_ahead_where_a_layers_compute_hides_less_than_a_chunk(self):
        hurried = self.plan(machine(vram=GB, layer_launch_s=1e-6))
        assert hurried.decisions.experts.prefetch == 0
        hits, gain = expert_notes(hurried, None)
        assert "prediction cannot pay" in gain and "15 MB is copied in 281 µs" in gain
        assert "47.8%" in hits and "moe.routings=FILE" in hits and "mix on routings" in next(expert_notes(hurried, "mix on routings"))

    def test_an_expert_is_fetched_ahead_where_compute_hides_a_chunk_of_it(self):
        slow = self.plan(machine(vram=GB, layer_launch_s=5e-3))
        assert slow.decisions.experts.prefetch == 2
        assert "are fetched ahead" in list(expert_notes(slow, None))[1]
        assert "moe.prefetch=0" in list(expert_notes(self.plan(machine(vram=GB, layer_launch_s=5e-3), expert_prefetch=0), None))[1]

    def test_the_ssd_is_read_ahead_where_a_layers_compute_hides_a_chunk_of_a_read(self):
        """15 MB in 2.14 ms beside a layer's 8, and in 150 ms: then what is wrongly read costs more than what is rightly read gains."""
        for gbps, ahead, said in ((7.0, 2, "2 from the SSD, where each takes 2.14 ms"), (0.1, 0, "none from the SSD, where")):
            hardware = machine(vram=GB, dram=900 * MB, layer_launch_s=5e-3, ssd_read=(SsdPoint(2**22, 8, gbps),))
            plan = self.plan(hardware)
            assert (plan.decisions.experts.prefetch, plan.decisions.experts.read_ahead) == (2, ahead)
            assert said in list(expert_notes(plan, None))[1]
            assert self.plan(hardware, expert_prefetch=0).decisions.experts.read_ahead == 0
            assert self.plan(hardware, expert_read_ahead=1).decisions.experts.read_ahead == 1

    def test_a_plan_that_keeps_all_experts_says_nothing_of_them(self):
        assert not list(expert_notes(self.plan(machine()), None)) and not list(expert_notes(self.plan(machine(), model()), None))

    def test_an_ssd_that_hides_behind_the_cpu_is_read_ahead(self):
        fast = (SsdPoint(2**22, 8, 7.0),)
        assert self.plan(machine(vram=0, dram=900 * MB, ssd_read=fast, cpu_matvec_gbps=5.0)).decisions.experts.prefetch >= 1


class TestRoutersAskedBeforehand:
    """What routings say that routers foresee, in the closed form."""

    def test_what_they_name_overlaps_until_nothing_but_the_slowest_stage_is_left(self):
        hardware, steps = machine(vram=GB, layer_launch_s=1e-4), []
        for share in (0.0, 0.5, 0.9, 1.0):
            m = moe()
            plan = TestForesight().plan(hardware, replace(m, routers=replace(m.routers, foreseen=share)), expert_vram_slots=4)
            slowest_s = max(plan.prediction.decode_stages.values())
            steps.append(plan.prediction.decode_s_per_token)
            assert (steps[-1] == pytest.approx(slowest_s, rel=1e-6)) == (share == 1)
        assert steps == sorted(steps, reverse=True) and len(set(steps)) == len(steps)

    def test_between_tokens_the_ssd_stands_still_for_what_is_behind_the_last_read(self):
        """Acted out: reads fall on layers at random, Poisson's number of them a step."""

        def pause(reads: float) -> float:
            return max(0.0, *(none + each * reads for none, each in map(behind_last, PAUSE_AT)))

        draw = np.random.default_rng(0)
        for reads in (0.3, 1.5, 6.0, 30.0):
            behind = [1 - max(draw.random(n), default=0.0) for n in draw.poisson(reads, 20_000)]
            assert np.mean(behind) * 0.7 < pause(reads) < np.mean(behind) * 1.02
        assert pause(1000) == 0

    def test_few_reads_of_what_is_foreseen_cost_more_than_their_bytes(self):
        m = moe()
        told = replace(m, routers=replace(m.routers, foreseen=1.0))
        hardware = machine(vram=2 * GB, layer_launch_s=4e-3)
        plan = TestForesight().plan(hardware, told, expert_vram_slots=4, expert_dram_slots=m.experts.units * 3 // 4)
        ssd_s, compute_s = (plan.prediction.decode_stages[stage] for stage in ("ssd", "card"))
        assert ssd_s < plan.prediction.decode_s_per_token < ssd_s + compute_s

    def test_as_many_are_fetched_as_a_token_uses_however_little_a_layer_hides(self):
        m = moe()
        told = replace(m, routers=replace(m.routers, foreseen=0.8))
        plan = TestForesight().plan(machine(vram=GB, layer_launch_s=1e-6), told)
        assert plan.decisions.experts.prefetch == m.experts.top_k
        assert "name 80% of those missed a layer ahead" in list(expert_notes(plan, None))[1]
