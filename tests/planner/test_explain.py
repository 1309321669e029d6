"""Why a plan is as it is: every figure is what solving again gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.config.config_schema import SolveConfig, WorkloadConfig
from penstock.planner.contract.decided.decisions import Decisions, ExpertPolicyName
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.given.workload import Objective
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.sizes import unit_dram_bytes
from penstock.planner.explain import explanation as explanation_module
from penstock.planner.explain import margins as margins_module
from penstock.planner.explain import one_more as one_more_module
from penstock.planner.explain import purchases as purchases_module
from penstock.planner.explain.constraints import Grip
from penstock.planner.explain.explain_table import print_explanation, print_impossible, standing
from penstock.planner.explain.explanation import Explanation, advice, check_share, document, explain, question_of
from penstock.planner.explain.margins import margins, step_of
from penstock.planner.explain.neighbours import candidates, neighbours
from penstock.planner.explain.purchases import next_card, offers, preset_cards
from penstock.planner.explain.resources import AMOUNTS, products, resources
from penstock.planner.render.stage_names import ROUTERS, stage_names
from penstock.planner.render.step_lanes import lanes
from penstock.planner.solver.impossible import document as document_of_impossible
from penstock.planner.solver.impossible import explain_impossible
from penstock.planner.solver.infeasible import Infeasible
from penstock.planner.solver.planning import answer, read_question
from penstock.planner.solver.program import Optimum, optimum, search, solve
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, MB, machine, model, work
from tests.planner.test_presets import hardware as preset
from tests.planner.test_presets import model as model_preset

SSD_BOUND = Question(machine(vram=1500 * MB, dram=2 * GB), model(24), work())
"""24 layers of 160 MB, of which most come from the SSD."""
MOE = Question(machine(vram=2 * GB, dram=4 * GB), model(16, ffn=480 * MB, experts=8), work(), Force(expert_policy=ExpertPolicyName.mix))


def plan_of(question: Question, decisions: Decisions) -> Plan:
    q = question
    return Plan(q.hardware, q.model, q.workload, decisions, predict(q.hardware, q.model, q.workload, decisions))


def edited(question: Question, **forced: int) -> Plan:
    """The plan that a user made of the best one by hand."""
    best = answer(question)
    return plan_of(question, Force(**forced).apply(best.decisions, question.model.layers))


def said_by(print_it, about, columns: int = 80) -> str:
    import io

    from rich.console import Console

    out = io.StringIO()
    print_it(about, Console(width=columns, file=out, highlight=False))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    return " ".join(out.getvalue().split())


@pytest.fixture(scope="module", autouse=True)
def solved_once() -> Iterator[None]:
    """Explanations of one question ask the program the same things. What a test asks itself is solved again."""
    known: dict[str, Optimum | None] = {}

    def remembered(question: Question) -> Optimum | None:
        key = repr(question)
        if key not in known:
            known[key] = optimum(question)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (explanation_module, margins_module, purchases_module, one_more_module):
            patch.setattr(module, "fastest", remembered)
        patch.setattr(explanation_module, "optimum", remembered)  # which neighbours are solved by
        yield


@pytest.fixture(scope="module")
def explained() -> Explanation:
    return explain(SSD_BOUND, None, 0.1)


def test_an_optimum_is_what_search_finds_and_nothing_where_no_plan_fits() -> None:
    q = SSD_BOUND
    found = optimum(q)
    assert found and found.total_s == pytest.approx(search(q.hardware, q.model, q.workload).best_s, rel=1e-9)
    assert predict(q.hardware, q.model, q.workload, solve(q.hardware, q.model, q.workload)).total_s <= found.total_s * 1.0051
    assert optimum(q.on(machine(vram=300 * MB))) is None


ALL = (*AMOUNTS.values(), products(model(4)))


@pytest.mark.parametrize("resource", ALL, ids=lambda r: r.key)
def test_a_machine_with_more_of_a_resource_has_so_much_of_it_and_no_other_changed(resource) -> None:
    hardware = machine(host=HostRates(6, {"BF16": Curve(((1, 40.0), (8, 30.0)))}, 0.0, 0.7, 0.7))
    more = resource.with_amount(hardware, resource.of(hardware) * 1.25)
    for other in ALL:
        factor = 1.25 if other is resource else 1.0
        assert other.of(more) == pytest.approx(other.of(hardware) * factor)


def test_without_a_gpu_there_is_neither_vram_nor_pcie_to_buy() -> None:
    assert [r.key for r in resources(machine(vram=0), model(4))] == ["dram", "bus", "ssd", "weights", "matrices"]


def test_what_a_gb_of_dram_is_worth_is_the_ssd_seconds_of_the_layers_that_it_keeps(explained: Explanation) -> None:
    margin = next(m for m in explained.margins if m.resource.key == "dram")
    layer = unit_dram_bytes(40 * MB) + unit_dram_bytes(120 * MB)
    kept = margin.step * GB / layer
    gbps = explained.base.token_s and max(p.gbps for p in SSD_BOUND.hardware.ssd_read)
    expected_s = 160 * MB / (gbps * GB)
    assert int(kept) * expected_s == pytest.approx(margin.gained_s, rel=0.35)
    assert margin.binds and margin.value_s == pytest.approx(margin.gained_s / margin.step)


def test_a_step_is_worth_what_solving_with_it_gives(explained: Explanation) -> None:
    for margin in explained.margins:
        r, hardware = margin.resource, SSD_BOUND.hardware
        again = optimum(SSD_BOUND.on(r.with_amount(hardware, r.of(hardware) + margin.step)))
        assert again and margin.gained_s == pytest.approx(explained.base.token_s - again.token_s, abs=1e-12)
    ssd = next(m for m in explained.margins if m.resource.key == "ssd")
    assert ssd.gain == pytest.approx(1 - 1 / 1.1, abs=0.02), "all of the time is the SSD's"


def test_what_holds_nothing_back_is_worth_nothing(explained: Explanation) -> None:
    matrices = next(m for m in explained.margins if m.resource.key == "matrices")
    assert abs(matrices.gain) < 1e-9 and not matrices.binds and not matrices.needed


def test_a_step_of_memory_holds_a_layer_at_least_and_a_rate_takes_its_share() -> None:
    vram, dram, ssd = (AMOUNTS[key] for key in ("vram", "dram", "ssd"))
    assert step_of(dram, 64.0, model(8), 0.1) == 7
    assert step_of(dram, 4.0, model(8), 0.1) == 1
    assert step_of(dram, 1.0, model(8), 0.1) == 0.5
    assert step_of(vram, 16.0, model(8, attn=GB, ffn=2 * GB), 0.1) == 4
    assert step_of(ssd, 7.0, model(8), 0.1) == pytest.approx(0.7)


def test_a_resource_without_which_no_plan_fits_is_needed() -> None:
    tight = Question(machine(vram=700 * MB), model(24), work())
    base = optimum(tight)
    assert base
    vram = margins(tight, base, 0.1)[0]
    assert vram.less is None and vram.lost_s is None and vram.needed


def test_no_neighbour_is_faster_than_the_best(explained: Explanation) -> None:
    losses = {(n.key, n.value): n.loss for n in explained.neighbours if n.loss is not None}
    assert len(losses) > 8 and min(losses.values()) > -1e-6
    cap = explained.plan.decisions.weights.dram.cap_layers
    assert losses["force.policy", "rolling"] > 0.2, "a rolling window reads every layer"
    assert losses["force.cap_layers", cap - 1] > 0.02


def test_a_neighbour_that_does_not_fit_says_so() -> None:
    base = optimum(SSD_BOUND)
    assert base
    (found,) = neighbours(SSD_BOUND, base, [("resident_ffn", 3, 24)])
    assert found.found is None and found.loss is None and found.why == "no plan fits"


def test_a_neighbour_that_breaks_a_rule_says_which() -> None:
    base = optimum(SSD_BOUND)
    assert base
    (found,) = neighbours(SSD_BOUND, base, [("hwm_layers", 5, -1)])
    assert found.found is None and found.lost_s is None and "force.hwm_layers=-1 breaks the rule" in found.why


def test_what_the_user_fixed_is_no_decision() -> None:
    forced = replace(SSD_BOUND, force=Force(cap_layers=3))
    asked = {name for name, *_ in candidates(forced, answer(forced).decisions)}
    assert "cap_layers" not in asked and {"policy", "resident_attn", "block_bytes"} <= asked


def test_neighbours_stay_within_the_menus() -> None:
    d = answer(SSD_BOUND).decisions
    for name, _, value in candidates(SSD_BOUND, d):
        if name in ("block_bytes", "queue_depth", "prefill_chunk_tokens"):
            assert value >= {"block_bytes": 2**22, "queue_depth": 4, "prefill_chunk_tokens": 256}[name]


def test_a_batch_is_a_decision_where_throughput_is_asked_for() -> None:
    q = Question(machine(vram=1500 * MB, dram=2 * GB), model(16), work(objective=Objective.throughput, batch=0, requests=16))
    found = explain(q, None, 0.1)
    rows = {n.value: n for n in found.neighbours if n.key == "workload.batch"}
    best = found.plan.decisions.batch
    assert rows and all(value != best and (n.loss is None or n.loss >= -1e-9) for value, n in rows.items())
    assert {n.found.batch for n in found.neighbours if n.found and n.key != "workload.batch"} == {best}


def test_the_stage_that_decode_waits_for_binds_and_the_hidden_ones_do_not(explained: Explanation) -> None:
    grips = {c.name: c.grip for c in explained.constraints}
    assert grips["decode: SSD read"] is Grip.binds and grips["decode: compute"] is Grip.slack
    assert grips["DRAM capacity"] is Grip.binds and grips["SSD capacity"] is Grip.slack


def test_memory_that_is_all_used_but_of_which_more_gains_nothing_is_needed() -> None:
    found = explain(Question(machine(vram=1500 * MB, dram=4 * GB), model(24), work()), None, 0.2)
    grips = {c.name: c.grip for c in found.constraints}
    assert grips["decode: H2D"] is Grip.binds and grips["DRAM capacity"] is Grip.needed and grips["VRAM capacity"] is Grip.binds


def test_what_a_rule_of_its_own_chose_is_named_where_another_choice_is_faster(explained: Explanation) -> None:
    assert standing(replace(explained, base=explained.neighbours[0].base)).endswith("No plan is faster.")
    one = next(n for n in explained.neighbours if n.found is not None)
    sooner = replace(one, key="force.page_tokens", value=64, found=replace(one.base, total_s=one.base.total_s * 0.95))
    said = standing(replace(explained, neighbours=(*explained.neighbours, sooner)))
    assert said.endswith("with the page_tokens that a rule of its own chose: 64 would take 5.0% less.")


def test_memory_in_which_everything_fits_has_slack() -> None:
    found = explain(Question(machine(), model(8), work()), None, 0.1)
    grips = {c.name: c.grip for c in found.constraints}
    assert grips["VRAM capacity"] is Grip.slack and grips["DRAM capacity"] is Grip.slack
    assert {m.resource.key: m.binds for m in found.margins}["weights"]


def test_the_advice_names_what_can_be_bought_the_one_that_gains_most_first(explained: Explanation) -> None:
    best = explained.best_buy
    assert best and best.gain == max(p.gain for p in explained.purchases if p.offer.is_bought)
    said = " ".join(advice(explained))
    assert said.startswith(f"{best.offer.name} takes ") and f"{best.gain:.1%}" in said
    assert "second SSD (7 to 14 GB/s)" in said and "second DRAM kit (" in said and "At no price: a batch of 8" in said
    assert not any(word in said for word in ("PCIe", "weight reads", "matrices", "DRAM bus"))
    nothing = replace(explained, purchases=tuple(replace(p, found=p.base, share=1.0) for p in explained.purchases))
    (said,) = advice(nothing)
    assert said.startswith("Nothing: none of these makes the best plan faster")


def test_each_offer_is_the_machine_with_it() -> None:
    asked = Question(machine(), model(8), work())
    found = {offer.key: offer.question for offer in offers(asked)}
    assert set(found) == {"card", "cards", "hosts", "dram", "ssd", "batch", "lossless", "int4"}
    assert found["dram"].hardware == replace(asked.hardware, dram_bytes=2 * asked.hardware.dram_bytes)
    assert max(p.gbps for p in found["ssd"].hardware.ssd_read) == 14.0 and found["batch"].workload.batch == 8
    card, own = found["card"].hardware, asked.hardware
    assert card.vram_bytes > own.vram_bytes and card.gpu.h2d.peak <= own.gpu.h2d.peak and card.gpu.memory_gbps >= own.gpu.memory_gbps
    assert card.gpu.name in {profile.gpu.name for profile in preset_cards()}
    most = replace(asked.hardware, vram_bytes=10**12)
    assert next_card(most) is None and "card" not in {offer.key for offer in offers(asked.on(most))}


def test_where_the_host_launches_too_slowly_no_resource_helps_and_that_is_said() -> None:
    asked = Question(machine(layer_launch_s=0.05), replace(model(8), model_type="bloom"), work(prompt_tokens=1, new_tokens=512))
    found = explain(asked, None, 0.1)  # no step of a Bloom is one graph, whatever card holds it
    assert found.best_buy is None and "layer_launch_s" in " ".join(advice(found))
    assert any(c.note.endswith("the slowest, launching kernels") for c in found.constraints)


def test_one_user_more_pays_for_its_row_and_its_kv(explained: Explanation) -> None:
    found, rows = explained.one_more, explained.plan.decisions.batch
    assert found.rows == rows and 0 < found.last_s <= found.step_s
    assert found.base and found.more and found.more.batch == rows + 1
    assert found.more.decode_s >= found.base.decode_s * (1 - 1e-6), "a step with one row more is no faster"
    assert found.more_bytes > 0 and f"User {rows + 1} takes" in " ".join(found.sentences())


def test_the_advice_names_both_phases_where_both_gain() -> None:
    found = explain(replace(SSD_BOUND, workload=work(objective=Objective.ttft)), None, 0.1)
    assert "takes a token from" in advice(found)[0] and "a prefill from" in advice(found)[0]
    assert "of the work's time" in advice(found)[0]


def test_the_plan_of_the_program_is_within_half_a_percent_and_was_not_changed(explained: Explanation) -> None:
    again = explain(SSD_BOUND, answer(SSD_BOUND), 0.1)
    assert not again.was_changed and again.lost == 0 and document(again)["margins"] == document(explained)["margins"]
    assert not any(n.is_decided for n in again.neighbours)


def test_an_edited_plan_is_told_what_it_lost_and_which_decision_costs_it() -> None:
    cap = answer(SSD_BOUND).decisions.weights.dram.cap_layers
    given = edited(SSD_BOUND, cap_layers=cap - 3)
    found = explain(question_of(given), given, 0.1)
    assert found.was_changed and found.plan is given and found.lost > 0.05
    own = {n.key: n.loss for n in found.neighbours if n.is_decided}
    assert own["force.cap_layers"] > 0.05 and own["force.resident_ffn"] < 0.01 and own["force.policy"] < 0.01
    said = said_by(print_explanation, found)
    assert said_by(print_explanation, found, 40) == said, "a narrow terminal cuts nothing off"
    assert "slower than what the program answers here" in said and "planner diff" in said and "as in the plan" in said


CHAT = read_question(SolveConfig(preset("rtx5080"), model_preset("llama70b"), WorkloadConfig("chat"))).question
IN_DOUBT = CHAT.on(replace(CHAT.hardware, dram_bytes=120 * GB))
"""Where the fastest plan waits for the SSD as long as for copies, by a datasheet's rates."""


def test_the_simple_plan_is_said_to_be_chosen_and_its_neighbours_are_compared_with_it() -> None:
    found = explain(IN_DOUBT, None, 0.1)
    assert found.is_simple and not found.was_changed and found.lost == 0
    text = said_by(print_explanation, found)
    assert "It is the simple plan (each tier filled, nearest first)" in text and "decisions with the simple one" in text
    assert all(n.base.total_s == found.plan.prediction.total_s for n in found.neighbours)
    losses = {(n.key, n.value): n.loss for n in found.neighbours if n.loss is not None}
    decided = found.plan.decisions.weights
    assert losses["force.resident_ffn", decided.vram.resident_units.ffn - 1] > 0 and losses["force.policy", "rolling"] > 1
    assert min(losses.values()) > -0.005, "the simple plan gives up half a percent for memory, as others do"
    assert document(found)["simple"]["least"] == pytest.approx(found.left.least, rel=1e-5)


def test_the_fastest_plan_is_told_that_the_program_would_take_the_simple_one() -> None:
    q = IN_DOUBT
    given = plan_of(q, solve(q.hardware, q.model, q.workload))
    found = explain(question_of(given), given, 0.1)
    assert not found.is_simple and not found.was_changed and found.lost >= 0 and document(found)["simple"] is None
    assert "The program's own answer is the simple plan" in said_by(print_explanation, found)


def test_a_plan_that_breaks_a_rule_is_told_so_and_the_best_one_is_explained() -> None:
    given = edited(SSD_BOUND, cap_layers=22)
    found = explain(question_of(given), given, 0.1)
    assert found.broken and "DRAM: the plan needs" in found.broken[0] and found.plan == found.own
    assert "This plan breaks a rule" in said_by(print_explanation, found)


def test_experts_are_explained_with_their_slots_and_what_their_routers_hold_up() -> None:
    found = explain(MOE, None, 0.1)
    keys = {n.key for n in found.neighbours}
    assert {"force.expert_vram_slots", "force.expert_dram_slots"} <= keys
    fewer = min((n for n in found.neighbours if n.key == "force.expert_dram_slots"), key=lambda n: n.value)
    assert fewer.loss is not None and fewer.loss > 0.01
    p = found.plan.prediction
    waits = p.decode_s_per_token - max(p.decode_stages.values())
    assert waits > 0 and any(c.name == "decode: routers" and c.used == pytest.approx(waits) for c in found.constraints)
    assert lanes(found.plan)[-1].stage == ROUTERS


@pytest.mark.parametrize("question", [SSD_BOUND, MOE, Question(machine(vram=0, dram=2 * GB), model(24), work())])
def test_the_lanes_of_a_step_are_as_long_as_its_stages(question: Question) -> None:
    plan = answer(question)
    for lane in lanes(plan):
        if lane.stage != ROUTERS:
            assert lane.busy_s == pytest.approx(plan.prediction.decode_stages[lane.stage]) and lane.stage in stage_names(plan)
        assert all(one.end_s == other.start_s for one, other in zip(lane.parts, lane.parts[1:], strict=False))
    ssd = next(lane for lane in lanes(plan) if lane.stage == "ssd")
    assert [p.name for p in ssd.parts if p.kind == "layer"] == [f"layer {i}" for i in plan.placement.ssd_layers]


def test_the_document_survives_json_and_names_every_row(explained: Explanation) -> None:
    read = json.loads(json.dumps(document(explained)))
    assert read["feasible"] and {m["resource"] for m in read["margins"]} == {r.key for r in resources(SSD_BOUND.hardware, SSD_BOUND.model)}
    dram = next(m for m in read["margins"] if m["resource"] == "dram")
    assert dram["saved_s_per_token_per_unit"] * dram["step"] == pytest.approx(read["best"]["token_s"] - dram["more"]["token_s"], rel=1e-3)
    assert (
        read["buy_next"]["key"] == explained.best_buy.offer.key
        and len(read["purchases"]) == 8
        and len(read["neighbours"]) == len(explained.neighbours)
    )


@pytest.mark.parametrize("share", [0, 1, -0.1, 2])
def test_a_step_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UserError, match="step="):
        check_share(share)


def impossible_of(question: Question):
    with pytest.raises(Infeasible) as none:
        answer(question)
    return explain_impossible(none.value)


@pytest.mark.parametrize(
    "hardware", [machine(vram=300 * MB), machine(dram=300 * MB, vram=GB), machine(vram=0, dram=400 * MB), machine(ssd=GB)]
)
def test_what_a_capacity_lacks_alone_makes_a_plan_fit_and_less_does_not(hardware) -> None:
    q = Question(hardware, model(16), work())
    found = impossible_of(q)
    rows = [row for row in found.shortages if row.together_bytes]
    assert len(rows) == 1
    for row in rows:
        key, alone = f"{row.tier}_bytes", row.alone_bytes
        assert alone == row.together_bytes and alone
        assert optimum(q.on(replace(hardware, **{key: row.capacity_bytes + alone + MB})))
        assert optimum(q.on(replace(hardware, **{key: row.capacity_bytes + alone - MB}))) is None
    assert all(remedy.found for remedy in found.remedies), "each remedy fits, and says how fast"


def test_another_capacity_that_would_do_as_well_is_a_remedy_of_its_own() -> None:
    found = impossible_of(Question(machine(dram=300 * MB, vram=GB), model(16), work()))
    alone = {row.tier: row.alone_bytes for row in found.shortages}
    assert alone["vram"] and alone["dram"] and alone["ssd"] is None, "residents in VRAM need no room in DRAM"
    hardware = [r.change for r in found.remedies if r.bytes]
    assert [("vram" in change, "dram" in change) for change in hardware] == [(False, True), (True, False)], "VRAM is dearer"


def test_where_two_capacities_are_short_neither_alone_mends_it() -> None:
    found = impossible_of(Question(machine(vram=300 * MB, ssd=GB), model(16), work()))
    assert [row.tier for row in found.shortages if row.together_bytes] == ["vram", "ssd"]
    assert all(row.alone_bytes is None for row in found.shortages)
    assert "hardware.vram_bytes=" in found.remedies[-1].change and "hardware.ssd_bytes=" in found.remedies[-1].change


def test_changes_that_take_no_hardware_come_first() -> None:
    found = impossible_of(Question(machine(vram=GB), model(16), work(batch=64)))
    assert [r.bytes > 0 for r in found.remedies] == sorted(r.bytes > 0 for r in found.remedies)
    assert any("workload.batch=" in r.change and r.bytes == 0 for r in found.remedies)
    document_of_it = json.loads(json.dumps(document_of_impossible(found)))
    assert not document_of_it["feasible"] and document_of_it["remedies"][0]["token_s"] > 0
    said = said_by(print_impossible, found)
    assert "No plan fits." in said and "VRAM" in said and "set workload.batch=" in said
