"""A model dealt over ranks: nothing is lost, each rank's plan is a plan, and one rank changes nothing."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.common.console import make_console
from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.recording import can_record, hops_launched
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.links import Links
from penstock.planner.contract.given.network import Network
from penstock.planner.contract.given.unit_spec import PER_LAYER, UnitKind
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.plan_ranks import check_ranks
from penstock.planner.contract.plan.planfile import check_plan, read_plan, write_plan
from penstock.planner.contract.plan.tier_fill import fills
from penstock.planner.contract.prices.launches import OPERATIONS, is_recorded
from penstock.planner.contract.prices.sizes import activation_bytes
from penstock.planner.contract.prices.stages import MixedPass
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.ranks.rank_chain import Passed, Ring, chained_s, hops_of
from penstock.planner.contract.ranks.rank_model import model_of_rank
from penstock.planner.contract.ranks.rank_share import share_of_rank
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.explain.purchases import offers, purchases
from penstock.planner.render.assumed import assumed
from penstock.planner.render.plan_text import print_plan
from penstock.planner.render.summary import summary
from penstock.planner.render.whereabouts import experts_in, layers_in
from penstock.planner.solver.infeasible import Infeasible
from penstock.planner.solver.planning import answer
from penstock.planner.solver.program import optimum
from penstock.planner.solver.ranks_choice import answer_dealt
from penstock.planner.solver.terms.problem import Question
from tests.cli import command, refusal
from tests.planner.small import GB, MB, blocks, gpu, machine, model, with_units, work

TOGETHER = Links(Curve(((1, 55.0), (2, 107.0), (4, 174.0))), 7e-5, 392.0)


def host(vram: int = 2 * GB, cards: int = 4, **change: Any) -> HardwareProfile:
    return machine(vram, **{"devices": tuple(range(cards)) if vram else (), "links": TOGETHER} | change)


@given(st.integers(1, 9), st.integers(0, 80), st.integers(1, 5000))
def test_every_layer_and_every_row_lies_with_one_rank(count, more, rows):
    dealing, vocab = Dealing.even(count, count + more), max(count, rows)
    layers = [(layer, rank, local) for rank in range(count) for local, layer in enumerate(dealing.of(rank))]
    assert sorted(layer for layer, _, _ in layers) == list(range(dealing.layers))
    assert all((dealing.owner(layer), dealing.local(layer)) == (rank, local) for layer, rank, local in layers)
    dealt = [dealing.vocab_rows(rank, vocab) for rank in range(count)]
    assert [row for rows in dealt for row in rows] == list(range(vocab))
    assert min(map(len, dealt)) >= 1
    assert max(map(len, dealt)) - min(map(len, dealt[:-1]), default=vocab) <= 128


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6).map(tuple))
def test_uneven_layers_are_spread_evenly(counts):
    """Each rank's layers come about as often at any place, the first one is rank 0's, and neighbours differ where they can."""
    dealing = Dealing(counts)
    layers = dealing.layers
    assert dealing.owners[0] == 0 and Counter(dealing.owners) == dict(enumerate(counts))
    assert all((dealing.owners[layer], dealing.local(layer)) == (r, i) for r in range(len(counts)) for i, layer in enumerate(dealing.of(r)))
    for rank, count in enumerate(counts):
        late = [dealing.owners[: at + 1].count(rank) - (at + 1) * count / layers for at in range(layers)]
        assert min(late) > -2 and max(late) < 2
    if max(counts) * 2 <= layers:
        assert all(one != other for one, other in pairwise(dealing.owners))
    assert {(one, other) for one, other in pairwise(dealing.owners) if one != other} <= set(dealing.ways)
    assert dealing.is_even == (dealing == Dealing.even(len(counts), layers))


@given(st.integers(1, 9), st.integers(0, 80))
def test_ranks_with_as_many_layers_have_them_in_turn(count, more):
    dealing = Dealing.even(count, count + more)
    assert dealing.owners == tuple(layer % count for layer in range(count + more))
    assert dealing.ways == tuple((rank, (rank + 1) % count) for rank in range(count))


@given(st.integers(2, 5), st.integers(5, 12), st.booleans(), st.data())
@settings(max_examples=50)
def test_the_units_of_all_ranks_are_the_whole_models(count, layers, tied, data):
    sizes = tuple(data.draw(st.lists(st.integers(1, 50).map(lambda n: n * MB), min_size=layers, max_size=layers)))
    whole = with_units(model(layers=layers, tied=tied), *blocks(UnitKind.ffn, sizes))
    dealing = Dealing.even(count, layers)
    parts = [model_of_rank(whole, dealing, rank) for rank in range(count)]
    again = Counter(
        replace(unit, layer=dealing.of(rank)[unit.layer])
        for rank, part in enumerate(parts)
        for unit in part.units
        if unit.layer is not None
    )
    assert again == Counter(unit for unit in whole.units if unit.kind in PER_LAYER)
    assert sum(part.norm_bytes for part in parts) == whole.norm_bytes
    assert sum(part.lm_head_bytes for part in parts) == whole.lm_head_bytes
    assert sum(part.embed_bytes for part in parts) == parts[0].embed_bytes == whole.embed_bytes
    assert sum(part.weight_bytes for part in parts) == whole.weight_bytes + tied * whole.lm_head_bytes
    assert sum(part.kv_bytes_per_token for part in parts) == whole.kv_bytes_per_token
    assert sum(part.vocab for part in parts) == whole.vocab == parts[-1].dealt.vocab


@given(
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([0, 600 * MB, 900 * MB, 2 * GB]),
    st.sampled_from([4 * GB, 64 * GB]),
    st.integers(4, 11),
    st.booleans(),
    st.sampled_from([1, 4]),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_the_plan_of_a_rank_holds_every_rule_and_comes_back_from_its_file(tmp_path_factory, count, vram, dram, layers, tied, batch):
    plan = answer_dealt(Question(host(vram=vram, dram=dram), model(layers=layers, tied=tied), work(batch=batch), ranks=count))
    ranks = [plan.of_rank(rank) for rank in range(count)]
    assert all(broken_rules(r.hardware, r.model, r.workload, r.decisions) == [] for r in ranks)
    assert sum(r.model.layers for r in ranks) == layers
    assert len({(r.decisions.batch, r.decisions.prefill_chunk_tokens, r.decisions.kv.page_tokens) for r in ranks}) == 1
    promised = plan.prediction
    assert promised.h2d_bytes_per_token == sum(r.prediction.h2d_bytes_per_token for r in ranks)
    assert {r.prediction.decode_s_per_token for r in ranks} == {promised.decode_s_per_token}
    if vram:
        carried = TOGETHER.together.at(count) if count > 1 else 55.0
        assert promised.decode_s_per_token * carried * 1e9 >= 0.999 * promised.h2d_bytes_per_token
    path = tmp_path_factory.mktemp("ranks") / "plan.yaml"
    write_plan(plan, path)
    again = read_plan(path)
    check_plan(again)
    assert (again.ranks, again.decisions, again.prediction) == (plan.ranks, plan.decisions, plan.prediction)
    assert [again.of_rank(rank) for rank in range(count)] == ranks


@given(st.sampled_from([0, 600 * MB, 2 * GB]), st.booleans())
@settings(max_examples=4, deadline=None, derandomize=True)
def test_one_rank_changes_no_plan(vram, tied):
    question = Question(host(vram=vram), model(tied=tied), work())
    plan = answer(question)
    assert answer_dealt(question) == plan == plan.of_rank(0)


def test_a_card_more_gains_what_its_link_carries():
    """24 equal layers, all outside VRAM: seconds are those of the bytes over all links together."""
    question = Question(host(vram=700 * MB, dram_bus_gbps=240.0), model(layers=24), work())
    step_s = {count: answer_dealt(replace(question, ranks=count)).prediction for count in (1, 2, 4)}
    assert step_s[1].decode_s_per_token / step_s[2].decode_s_per_token > 1.8
    assert step_s[1].decode_s_per_token / step_s[4].decode_s_per_token > 2.8
    for count, promised in step_s.items():
        assert promised.h2d_bytes_per_token / promised.decode_s_per_token / GB > 0.92 * (TOGETHER.together.at(count))


def test_misses_of_the_layers_of_several_ranks_follow_each_other_and_more_cards_hold_more_experts():
    """A card more has slots for a share of its layers' experts; each missed one is copied at the rate of one link."""
    question = Question(host(vram=3 * GB, dram=64 * GB), model(layers=16, attn=20 * MB, ffn=1600 * MB, experts=8), work())
    step_s = {}
    for count in (1, 2, 4):
        plan = answer_dealt(replace(question, ranks=count))
        ranks, promised = plan.each_rank, plan.prediction
        assert [one.model.experts.units for one in ranks] == [128 // count] * count
        assert all(broken_rules(r.hardware, r.model, r.workload, r.decisions) == [] for r in ranks)
        assert sum(lies.count for lies in experts_in(plan).values()) >= 128
        step_s[count] = promised.decode_s_per_token
        copied_s = promised.h2d_bytes_per_token / 55 / GB
        assert copied_s < step_s[count] < copied_s + 0.012, "experts are computed behind their copies"
    assert step_s[1] > 1.15 * step_s[2] > 1.6 * step_s[4]


def test_layers_of_several_ranks_follow_each_other():
    """All in VRAM: two cards compute no sooner than one, and hops come on top."""
    question = Question(host(vram=40 * GB, links=replace(TOGETHER, hop_s=1e-3), layer_launch_s=1e-9), model(), work())
    one, two = (answer_dealt(replace(question, ranks=count)).prediction.decode_s_per_token for count in (1, 2))
    assert two == pytest.approx(one + 9e-3, rel=0.02), "seven between layers, two behind them"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple), st.integers(1, 12), st.floats(0, 3), st.floats(0, 2), st.data())
def test_a_pass_in_parts_takes_what_its_ring_takes(counts, parts, hop_s, head_s, data):
    """Each part of each layer played: it waits for its rank, and for the hop of the same part from the layer before on another rank."""
    dealing, layer_s = Dealing(counts), data.draw(st.lists(st.floats(0.5, 4), min_size=len(counts), max_size=len(counts)))

    def played(layer_s: list[float]) -> float:
        free, here, before = [0.0] * len(counts), [0.0] * parts, 0
        for owner in dealing.owners:
            for number in range(parts):
                free[owner] = max(free[owner], here[number] + hop_s * (owner != before)) + layer_s[owner] / parts
                here[number] = free[owner]
            before = owner
        return here[-1]

    assert Ring(layer_s, parts, hop_s, 0.0).through(dealing.owners) == pytest.approx(played(layer_s))
    part = model_of_rank(model(layers=dealing.layers), dealing, 0)
    machine, own_s = host(links=Links(None, hop_s, 0.0)), part.layers + head_s
    found = chained_s(machine, part, Passed(64, 3, parts, 3 * head_s), lambda machine, own, least_s: 3 * own_s)
    whole_s = played([1.0] * len(counts)) + 2 * hop_s + head_s if len(counts) > 1 else own_s
    assert found == pytest.approx(3 * max(own_s, whole_s))


def test_prompts_go_round_in_parts_where_computing_binds():
    question = Question(host(vram=40 * GB, dram_bus_gbps=240.0), model(layers=24), work(prompt_tokens=8192))
    plans = {count: answer_dealt(replace(question, ranks=count)) for count in (1, 2, 4)}
    prefill_s = {count: plan.prediction.prefill_s for count, plan in plans.items()}
    assert prefill_s[1] / prefill_s[2] > 1.9 and prefill_s[1] / prefill_s[4] > 3.7
    parts = {count: {one.prefill_part_tokens for one in plan.ranks.decided(plan.decisions)} for count, plan in plans.items()}
    assert parts[1] == {0} and all(len(parts[count]) == 1 and 128 <= min(parts[count]) <= 8192 // count for count in (2, 4))
    whole = answer_dealt(replace(question, ranks=2, force=Force(prefill_part_tokens=0))).prediction.prefill_s
    assert whole == pytest.approx(prefill_s[1], rel=0.02), "as a whole one card computes at a time"
    with pytest.raises(UserError, match="prefill_part_tokens"):
        answer_dealt(replace(question, force=Force(prefill_part_tokens=64)))


def in_parts(tokens: int | None = None, **change: Any) -> Plan:
    """Of four cards that hold all of a model, a long prompt in parts of ``tokens``; None: as the program chooses."""
    machine, asked = host(vram=40 * GB, dram_bus_gbps=240.0, **change), work(prompt_tokens=8192)
    force = Force(prefill_chunk_tokens=8192, prefill_part_tokens=tokens)
    return answer_dealt(Question(machine, model(layers=24), asked, force, ranks=4))


def test_who_launches_slowly_has_larger_parts():
    """A layer's part takes what it computes, or what launching it takes."""
    quick, slow = in_parts(layer_launch_s=1e-9), in_parts(layer_launch_s=4e-3)
    sizes = [plan.decisions.prefill_part_tokens for plan in (quick, slow)]
    assert sizes[0] < sizes[1] < 8192
    for tokens in (256, 512, 1024):
        each = OPERATIONS.dense(True) - OPERATIONS.known + OPERATIONS.part + OPERATIONS.behind
        launching_s = 6 * (8192 / tokens) * 4e-3 * each / OPERATIONS.dense(True)
        forced = in_parts(tokens, layer_launch_s=4e-3).prediction.prefill_s
        assert forced == pytest.approx(launching_s, rel=0.1) and forced > slow.prediction.prefill_s * 0.99


def test_a_pass_in_parts_has_activations_of_one_of_them():
    whole = model(layers=24)
    dealt, asked = model_of_rank(whole, Dealing.even(2, 24), 0), work(prompt_tokens=8192)
    sizes = [activation_bytes(dealt, asked, 1, 8192, parts) for parts in (0, 8192, 2048, 256)]
    assert sizes[0] == sizes[1] > sizes[2] > sizes[3] > 8192 * dealt.hidden * 2 * 4


def test_a_servers_passes_over_ranks_wait_for_all_of_them():
    question = Question(host(vram=40 * GB, layer_launch_s=1e-9), model(), work(clients=6, requests=40, batch=4))
    one, two = (answer_dealt(replace(question, ranks=count)) for count in (1, 2))
    assert all(broken_rules(r.hardware, r.model, r.workload, r.decisions) == [] for r in two.each_rank)
    for mixed in (MixedPass(4, 100.0, 0, 0.0), MixedPass(3, 100.0, 64, 32.0)):
        alone_s, dealt_s = (PassPrices(plan).seconds(mixed) for plan in (one, two))
        assert alone_s < dealt_s < alone_s + 12 * TOGETHER.hop_of(mixed.all_tokens * model().hidden * 2)
    limits = [ServeLimits.of(plan) for plan in (one, two)]
    assert limits[0].rows == limits[1].rows and limits[0].pages == limits[1].pages


def test_a_rank_has_its_card_and_its_share_of_the_rest():
    whole = host()
    share = share_of_rank(whole, 4, 3)
    assert (share.vram_bytes, share.dram_bytes, share.cpu_cores) == (whole.vram_bytes, whole.dram_bytes // 4, whole.cpu_cores // 4)
    assert share.devices == (3,)
    assert share.gpu.h2d.peak == pytest.approx(174 / 4)
    assert share.ssd_peak_gbps == whole.ssd_peak_gbps / 4


def test_a_host_more_brings_its_drive_and_its_memory(tmp_path):
    """Layers come from the SSD: two hosts read twice as fast, and what goes between them is priced by their network."""
    one = host(vram=0, dram=2 * GB, cpu_matvec_gbps=200.0, layer_launch_s=1e-6)
    question = Question(one, model(layers=24), work())
    both = replace(question, hardware=replace(one, hosts=2, network=Network(1.25, 1e-4)), ranks=2)
    plan, alone = answer_dealt(both), answer_dealt(question).prediction
    assert alone.bottleneck_decode == plan.prediction.bottleneck_decode == "ssd"
    assert alone.decode_s_per_token / plan.prediction.decode_s_per_token > 1.8
    slow = replace(both, hardware=replace(both.hardware, network=Network(1.25, 1.0)))
    assert 25 < answer_dealt(slow).prediction.decode_s_per_token < 25.1, "23 hops between layers, two behind them"
    assert {share_of_rank(one, 1, 0).dram_bytes} == {plan.of_rank(rank).hardware.dram_bytes for rank in range(2)}
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan
    assert {fill.tier: fill.capacity_bytes for fill in fills(plan)}["dram"] == 4 * GB
    assert "hosts" in {offer.key for offer in offers(question)}


def test_hops_are_recorded_with_steps_where_their_seconds_are_known():
    """All in VRAM, launches bind: a recorded step takes its layers one after the other, and each hop what words take."""
    launching = host(vram=40 * GB, gpu=gpu(layer_kernels_s=1e-5), layer_launch_s=5e-3)
    question = Question(launching, model(), work())
    words = replace(launching, links=replace(TOGETHER, word_hop_s=1e-3))
    alone, two = answer_dealt(question), answer_dealt(replace(question, hardware=words, ranks=2))
    unknown = answer_dealt(replace(question, ranks=2))
    step_s = [plan.prediction.decode_s_per_token for plan in (alone, unknown, two)]
    assert step_s[1] > 8 / 2 * 5e-3 and "word_hop_s" in hops_launched(unknown.hardware, unknown.of_rank(1).model)
    row = model().hidden * 2 * (1 / launching.gpu.d2h.peak + 1 / launching.gpu.h2d.peak) / 1e9
    head_s = model().lm_head.stored_bytes / launching.weight_gbps / 1e9 / 2
    assert step_s[2] - step_s[0] == pytest.approx(9 * 1e-3 + 7 * row - head_s, rel=1e-3), (
        "7 hops between layers, two behind them; half a head"
    )
    said = [[what for _, what, _ in assumed(plan.hardware, plan.model, 2) if what.endswith(("each", "step"))] for plan in (unknown, two)]
    assert said == [["70 µs each"], ["70 µs each", "1 ms each in a recorded step"]]
    assert is_recorded(two.of_rank(1).hardware, two.of_rank(1).placement, two.of_rank(1).decisions.kv)
    apart = replace(words, hosts=2, network=Network(1.25, 1e-4))
    assert hops_launched(apart, two.of_rank(1).model) == "hidden states go from host to host"
    routed = model_of_rank(model(experts=4), Dealing.even(2, 8), 1)
    assert can_record(words, routed) and can_record(words, model(experts=4))
    assert not can_record(words, model_of_rank(model(experts=4), Dealing.even(2, 8, ExpertShare.sliced), 1))


def test_ranks_of_a_host_are_neighbours_and_have_its_cards():
    whole = host(cards=2, hosts=2, network=Network(1.25, 1e-4))
    shares = [share_of_rank(whole, 4, rank) for rank in range(4)]
    assert [share.devices for share in shares] == [(0,), (1,), (0,), (1,)]
    assert {(share.dram_bytes, share.gpu.h2d.peak) for share in shares} == {(whole.dram_bytes // 2, 107 / 2)}
    part = model_of_rank(model(), Dealing.even(4, 8), 1)
    there, apart = hops_of(shares[1], part, 1), hops_of(replace(shares[1], hosts=1), part, 1)
    row = model().hidden * 2
    assert apart == (TOGETHER.hop_of(row), TOGETHER.hop_s)
    assert there == pytest.approx(((TOGETHER.hop_of(row) + whole.network.hop_of(row)) / 2, 1e-4))


@pytest.mark.parametrize(
    ("count", "change", "says"),
    [
        (2, {"hosts": 2}, r"hardware\.hosts=2: how fast their network is, is not known; measure it"),
        (
            3,
            {"hosts": 2, "network": Network(1.25, 1e-4)},
            r"ranks=3: hardware\.hosts=2, with as many ranks on each; set ranks=2, or another",
        ),
        (0, {}, "ranks=0: must be 1 or more; set ranks=1, or leave it out"),
        (5, {}, "ranks=5: small has 4 GPUs for plans; set ranks=4 or fewer and solve again"),
        (2, {"cards": 1}, "ranks=2: small has 1 GPU for plans; set ranks=1 and solve again"),
        (9, {"cards": 16}, "ranks=9: small has 8 layers, and each rank needs one; set ranks=8 or fewer"),
        (9, {"vram": 0}, r"ranks=9: hardware\.cpu\.cores=8, and each rank needs one; set ranks=8 or fewer"),
    ],
)
def test_too_many_ranks_are_refused_in_one_line(count, change, says):
    with pytest.raises(UserError, match=says):
        check_ranks(host(**change), model(), work(), count)


@pytest.mark.parametrize(
    ("of", "asked", "says"),
    [
        (model(experts=8), {"kv_spill": True}, r"with workload\.kv_spill=true copies of KV .*; set ranks=1, or leave workload\.kv_spill"),
        (replace(model(), state_bytes=5), {}, "small runs on one rank, since some layers keep a state that cannot"),
    ],
)
def test_what_works_on_one_rank_alone_is_refused_in_one_line(of, asked, says):
    with pytest.raises(UserError, match=f"ranks=2: {says}"):
        check_ranks(host(), of, work(**asked), 2)


def test_what_a_machine_lacks_for_several_ranks_is_said_of_the_machine():
    question = Question(host(vram=0, dram=400 * MB), model(layers=8), work(), ranks=2)
    with pytest.raises(Infeasible, match=r"allowed: hardware\.dram_bytes=0\.4\d\dGB\).* raise to hardware\.dram_bytes=") as refused:
        answer_dealt(question)
    needed = float(re.search(r"raise to hardware\.dram_bytes=([\d.]+)GB", str(refused.value))[1])
    fits = replace(question, hardware=host(vram=0, dram=round(needed * GB)))
    assert all(broken_rules(r.hardware, r.model, r.workload, r.decisions) == [] for r in answer_dealt(fits).each_rank)


def test_a_plan_file_says_which_rank_is_wrong(tmp_path: Path):
    path = tmp_path / "plan.yaml"
    write_plan(answer_dealt(Question(host(), model(layers=5), work(), ranks=2)), path)
    text = path.read_text().partition("\nranks:")[0] + "\n"
    whole = path.read_text()
    kept = text + whole[whole.index("# What it promises") :]
    for said, wrong in ((r"ranks\.count=0: must be 1 to", "{count: 0}"), (r"ranks\.others\.7: ", "{count: 2, others: {'7': {}}}")):
        path.write_text(f"{kept}ranks: {wrong}\n")
        with pytest.raises(UserError, match=said):
            read_plan(path)
    path.write_text(kept)
    assert read_plan(path).ranks.count == 1, "an old file has no such section"


def test_a_plan_says_who_has_what(capsys: pytest.CaptureFixture[str]):
    plan = answer_dealt(Question(host(vram=700 * MB), model(layers=23), work(), ranks=4))
    print_plan(plan, make_console())
    told = capsys.readouterr().out
    assert "23 layers, 3.8 GB of weights, over 4 ranks" in told
    assert re.search(r"  rank 3      (···[▒█]){5}···  5 layers, .*, GPU 3\n", told) and "···▒" in told
    assert "  4 links     174 GB/s at once" in told
    each = summary(plan, "plan.yaml")["ranks"]
    assert [one["layers"] for one in each] == [list(range(rank, 23, 4)) for rank in range(4)]
    assert sum(one["h2d_bytes_per_token"] for one in each) == plan.prediction.h2d_bytes_per_token
    assert sum(lies.count for lies in layers_in(plan).values()) == 23
    assert fills(plan)[0].capacity_bytes == 700 * MB


def test_one_more_card_is_offered_with_what_it_gives():
    question = Question(host(cards=1, vram=700 * MB, dram_bus_gbps=240.0), model(layers=8), work())
    offered = {offer.key: offer for offer in offers(question)}["cards"]
    (bought,) = purchases(question, [offered], optimum(question))
    promised = answer_dealt(replace(question, hardware=host(cards=2, vram=700 * MB, dram_bus_gbps=240.0), ranks=2)).prediction
    assert offered.name == "one more small (2 in all, links of 55 to 107 GB/s together, ranks=2)" and bought.pays
    assert bought.found.decode_s == pytest.approx(promised.decode_s_per_token, rel=0.006), "the fastest plan, and one with less memory"
    assert "cards" not in {offer.key for offer in offers(replace(question, model=replace(model(), state_bytes=5)))}


def asked(tmp_path: Path, *words: str) -> Plan:
    done = command("planner", "solve", "hardware=h100x2", "model=llama8b", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return read_plan(tmp_path / "plan.yaml")


def test_all_cards_are_used_where_that_is_faster_unless_one_is_named(tmp_path: Path):
    assert asked(tmp_path, "hardware.vram_bytes=4GiB").ranks.count == 2
    assert asked(tmp_path, "hardware.vram_bytes=4GiB", "hardware.devices=[1]").ranks.count == 1
    resident = asked(tmp_path)
    assert resident.ranks.count == 1 and any(
        note.startswith("one of 2 GPUs is used: layers") and "links.word_hop_s" in note for note in resident.notes
    )
    served = asked(tmp_path, "workload=serve")
    assert served.ranks.count == 1 and "one of 2 GPUs is used: a server takes more where they are asked for (ranks=2)" in served.notes
    refused = refusal("planner", "solve", "hardware=h100x2", "model=llama8b", "ranks=3", "out=other.yaml", cwd=tmp_path)
    assert "ranks=3: h100x2 has 2 GPUs for plans; set ranks=2 or fewer and solve again" in refused


def test_verbs_of_one_rank_refuse_a_plan_of_several(tmp_path: Path):
    write_plan(answer_dealt(Question(host(), model(), work(), ranks=2)), tmp_path / "two.yaml")
    for program, *words in (("planner", "export", "to=accelerate"),):
        said = refusal(program, *words, "plan=two.yaml", cwd=tmp_path)
        assert f"is for 2 ranks, and `{program} {words[0]}` works on one alone yet; solve again with ranks=1" in said
