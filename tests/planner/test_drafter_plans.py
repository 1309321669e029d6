"""A model that drafts is in the plan: its bytes, its seconds, its place in the file; one that cannot draft is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.contract.lessons.fit import Measured, fit
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.prices.memory_law import drafter_bytes, dram_use, recorded_shapes, shapes_wanted, used_bytes, vram_use
from penstock.planner.contract.prices.sizes import OVERHEADS, recorded_bytes
from penstock.planner.contract.prices.stages import MixedPass
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.contract.serving.arrivals import Arrivals
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_drafts import PlannedDrafts
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serving_forecast import simulate_serving
from penstock.planner.contract.speculation.verify_shapes import VerifyShape
from tests.support import add_further_head, save_tiny

SMALL = {"workload.prompt_tokens": 64, "workload.new_tokens": 64}


def test_the_copy_takes_room_that_residents_had_and_a_step_for_each_draft(tmp_path: Path) -> None:
    keys = {"hardware": "rtx4090", "model": "llama8b", **SMALL, "hardware.vram_bytes": 10 * 2**30}
    plain = penstock.solve(**keys)
    plan = penstock.solve(speculate="self", **keys)
    three, four = (penstock.solve(speculate="self", **{"force.speculate_tokens": k}, **keys) for k in (3, 4))
    decided, drafter = plan.decisions.speculation, plan.drafter
    assert drafter is not None
    assert drafter.model.weight_bytes < plan.model.weight_bytes / 2
    taken = drafter_bytes(plan.hardware, plan.model, plan.workload, plan.decisions)[Tier.vram]
    assert taken > drafter.model.weight_bytes
    assert vram_use(plan.hardware, plan.model, plan.workload, plan.decisions)["drafter"] == taken
    assert plan.prediction.vram_bytes <= plan.hardware.vram_bytes
    assert plan.decisions.weights.vram.resident_units.ffn < plain.decisions.weights.vram.resident_units.ffn
    assert (decided.drafter, decided.acceptance) == (Drafter.self, 0.8)
    assert plan.prediction.decode_tokens_per_s > plain.prediction.decode_tokens_per_s
    more_s = four.prediction.decode_s_per_token - three.prediction.decode_s_per_token
    assert more_s >= 0.99 * drafter.prediction.decode_s_per_token
    assert not broken_rules(drafter.hardware, drafter.model, drafter.workload, drafter.decisions)
    assert any("80% of them kept" in note for note in plan.notes)
    write_plan(plan, tmp_path / "plan.yaml")
    again = read_plan(tmp_path / "plan.yaml")
    assert again.decisions == plan.decisions
    assert again.drafter == drafter


def test_what_runs_found_of_each_pass_is_paid_once_however_many_steps_drafted_for_it() -> None:
    """They found it of passes of the model itself: were it paid for each draft, one millisecond would be sixteen of a long chain."""
    keys = {"hardware": "rtx4090", "model": "llama8b", **SMALL, "hardware.vram_bytes": 10 * 2**30, "speculate": "self"}
    keys["force.speculate_tokens"] = 15
    plan, slower = penstock.solve(**keys), penstock.solve(**keys, **{"hardware.pass_s": 0.001})
    assert slower.decisions == plan.decisions
    assert slower.prediction.decode_s_per_token - plan.prediction.decode_s_per_token == pytest.approx(0.001)
    assert slower.drafter.prediction == plan.drafter.prediction
    seen = Measured(decode_s=slower.prediction.decode_s_per_token)
    fitted = fit(plan.hardware, plan.model, plan.workload, plan.decisions, seen)
    assert fitted.pass_s == pytest.approx(0.001)


def test_passes_that_verify_are_recorded_where_vram_has_room_for_them() -> None:
    """A plan leaves it; of one that is asked to draft later as many as fit, most sequences first, and never more than VRAM has."""
    keys = {"hardware": "rtx4090", "model": "llama8b", **SMALL, "hardware.vram_bytes": 10 * 2**30}
    plain, plan = penstock.solve(**keys), penstock.solve(speculate="lookup", **keys)
    asked = plan.hardware, plan.model, plan.workload, plan.decisions
    wanted = shapes_wanted(plan.hardware, plan.model, plan.decisions)
    assert wanted == (VerifyShape(1, 1 + plan.decisions.speculation.tokens),) == recorded_shapes(*asked)
    assert vram_use(*asked)["verify"] > OVERHEADS.recorded_bytes and "verify" not in vram_use(*asked[:3], plain.decisions)
    rows = replace(plan.decisions, batch=64)
    took = used_bytes(vram_use(*asked[:3], replace(rows, speculation=Speculation()))) + plan.workload.vram_guard_bytes
    found = []
    for room in range(0, 600 * 2**20, 2**20):
        machine = replace(plan.hardware, vram_bytes=took + room)
        shapes = recorded_shapes(machine, plan.model, plan.workload, rows)
        assert recorded_bytes(plan.model, shapes) <= room
        found.append(len(shapes))
    assert found == sorted(found) and set(found) == {0, 1, 2, 3, 4}
    on_cpu = replace(plan.hardware, gpu=None)
    assert not shapes_wanted(on_cpu, plan.model, plan.decisions)


def test_residents_or_a_drafter_is_what_gives_more_tokens(tmp_path: Path) -> None:
    small, large = save_tiny(tmp_path / "small", layers=1), save_tiny(tmp_path / "large", layers=4)
    keys = {"hardware": "cpu", "model.checkpoint": str(large), **SMALL}
    rates = {
        who: penstock.solve(speculate=who, draft=str(small) if who in ("draft", "auto") else None, **keys).prediction.decode_tokens_per_s
        for who in ("none", "lookup", "draft", "auto")
    }
    assert rates["auto"] == max(rates.values())


def test_a_server_pays_for_each_step_of_its_drafter_and_for_what_it_reads(tmp_path: Path) -> None:
    small, large = save_tiny(tmp_path / "small", layers=1), save_tiny(tmp_path / "large", layers=4)
    keys = {"hardware": "cpu", "model.checkpoint": str(large), "workload": "serve", "workload.clients": 4, "workload.batch": 4, **SMALL}
    plan = penstock.solve(speculate="draft", draft=str(small), **{"force.speculate_tokens": 3}, **keys)
    assert plan.workload.is_served and plan.drafter is not None and plan.decisions.speculation.tokens == 3
    assert dram_use(plan.hardware, plan.model, plan.workload, plan.decisions)["drafter"] > plan.drafter.model.weight_bytes
    prices, own = PassPrices(plan), PassPrices(plan.drafter)
    planned = PlannedDrafts(plan, ServeLimits.of(plan), prices)
    for rows, drafts in ((1, 0), (1, 3), (4, 2)):
        verified = MixedPass(rows, 100.0, 0, 0.0, drafted=rows * drafts)
        assert planned.seconds(verified) == pytest.approx(prices.seconds(verified) + drafts * own.decode_s(rows, 100.0))
    assert planned.reading_s(600) > planned.reading_s(60) > own.decode_s(1, 60)
    played = simulate_serving(plan, Arrivals.of(plan.workload, 40))
    assert played.requests == 40 and 0 <= played.kept <= played.drafted
    auto = penstock.solve(speculate="auto", draft=str(small), **keys)
    if auto.drafter is not None:
        assert auto.prediction.decode_tokens_per_s > penstock.solve(**keys).prediction.decode_tokens_per_s


def test_auto_drafts_by_the_models_own_head_where_that_gives_most(tmp_path: Path) -> None:
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
    checkpoint = save_tiny(tmp_path / "glm", "glm4_moe", layers=14, first_k_dense_replace=13, **routed)  # type: ignore[arg-type]
    add_further_head(checkpoint)
    keys = {"hardware": "cpu", "model.checkpoint": str(checkpoint), **SMALL}
    plans = {who: penstock.solve(speculate=who, **keys) for who in ("lookup", "auto")}
    assert plans["auto"].decisions.speculation.drafter is Drafter.mtp
    assert plans["auto"].prediction.decode_tokens_per_s > plans["lookup"].prediction.decode_tokens_per_s
    assert not any("left out" in note for note in plans["auto"].notes)
    assert any("left out" in note for note in plans["lookup"].notes)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"draft": "{small}"}, "speculate=none drafts without a model"),
        ({"draft": "{small}", "speculate": "lookup"}, "speculate=lookup drafts without a model"),
        ({"speculate": "draft"}, "speculate=draft: no model is given; set draft=DIR"),
        ({"speculate": "draft", "draft": "{other}"}, "its tokens are not those of large: 'b' is 2 there and 1 here"),
        ({"speculate": "draft", "draft": "{wide}"}, "it has 512 tokens and large 300"),
        ({"speculate": "self", "draft": "{deep}"}, "deep: it is no copy of large, whose layers and widths differ; set speculate=draft"),
        ({"speculate": "draft", "draft": "{eagle}"}, "EAGLE heads read the hidden states"),
        (
            {"speculate": "draft", "draft": "{small}", "hardware.dram_bytes": 10**8},
            "small takes .* of DRAM, and what it leaves holds no plan",
        ),
    ],
)
def test_a_drafter_that_cannot_draft_is_refused(tmp_path: Path, keys: dict[str, object], said: str) -> None:
    places = {name: save_tiny(tmp_path / name, layers=1) for name in ("small", "large", "other")}
    places["wide"] = save_tiny(tmp_path / "wide", layers=1, vocab_size=512)
    places["deep"] = save_tiny(tmp_path / "deep", layers=2)
    places["eagle"] = tmp_path / "eagle"
    places["eagle"].mkdir()
    (places["eagle"] / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}))
    for name, vocabulary in {"large": {"a": 0, "b": 1}, "small": {"a": 0, "b": 1}, "other": {"a": 0, "b": 2}}.items():
        (places[name] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    given = {key: value.format(**places) if isinstance(value, str) else value for key, value in keys.items()}
    with pytest.raises(penstock.UserError, match=said):
        penstock.solve(**{"hardware": "cpu", "model.checkpoint": str(places["large"]), **SMALL, **given})


RANKS = {"hardware": "h100x4", "model": "llama70b", "hardware.vram_bytes": 16 * 2**30, "hardware.dram_bytes": 400 * 2**30, **SMALL}


def test_ranks_draft_what_they_look_up(tmp_path: Path) -> None:
    """All decide the same drafts, and are predicted and simulated with them."""
    plain, plan = (penstock.solve(ranks=2, speculate=who, **{"force.host_ffn": 0}, **RANKS) for who in ("none", "lookup"))
    made = [decided.speculation for decided in plan.ranks.decided(plan.decisions)]
    assert made[0].drafter is Drafter.lookup and made[0].tokens > 1 and made[0] == made[1]
    assert plan.prediction.decode_tokens_per_s > 1.35 * plain.prediction.decode_tokens_per_s
    assert any("drafts by lookup" in note for note in plan.notes)
    write_plan(plan, tmp_path / "plan.yaml")
    again = read_plan(tmp_path / "plan.yaml")
    assert (again.decisions, again.ranks) == (plan.decisions, plan.ranks)
    assert not [rule for rank in plan.each_rank for rule in broken_rules(rank.hardware, rank.model, rank.workload, rank.decisions)]
    forced = penstock.solve(ranks=2, speculate="lookup", **{"force.speculate_tokens": 3}, **RANKS)
    assert forced.decisions.speculation.tokens == 3


def test_a_server_of_several_ranks_drafts_what_it_looks_up() -> None:
    plan = penstock.solve(ranks=2, speculate="lookup", workload="serve", **RANKS)
    made = [decided.speculation for decided in plan.ranks.decided(plan.decisions)]
    assert made[0].drafter is Drafter.lookup and made[0].tokens and made[0] == made[1]


def test_a_model_drafts_beside_the_first_rank(tmp_path: Path) -> None:
    """It alone has the model, so that it keeps fewer units, and all verify what is drafted."""
    plan = penstock.solve(ranks=2, speculate="self", **RANKS | {"hardware.vram_bytes": 60 * 2**30, "force.host_ffn": 0})
    first, second = plan.each_rank
    assert first.drafter is not None and second.drafter is None and plan.drafter == first.drafter
    kept = [rank.decisions.weights.vram.resident_units for rank in plan.each_rank]
    assert kept[0].attn + kept[0].ffn < kept[1].attn + kept[1].ffn
    assert first.decisions.speculation.tokens == second.decisions.speculation.tokens > 0
    for rank in plan.each_rank:
        assert rank.prediction.vram_bytes <= 60 * 2**30
        assert not broken_rules(rank.hardware, rank.model, rank.workload, rank.decisions)
    write_plan(plan, tmp_path / "plan.yaml")
    again = read_plan(tmp_path / "plan.yaml")
    assert (again.decisions, again.ranks) == (plan.decisions, plan.ranks)


def test_further_heads_of_several_ranks_are_refused() -> None:
    with pytest.raises(penstock.UserError, match="ranks=2: speculate=mtp: further heads read the hidden states of one rank alone yet"):
        penstock.solve(ranks=2, speculate="mtp", **RANKS)
