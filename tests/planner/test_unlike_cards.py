"""Unlike cards of one host: each has the layers with which all end together, and what is promised is what a simulation finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.planner.common.errors import UserError
from penstock.planner.common.strictly import build
from penstock.planner.contract.config.config_schema import HardwareConfig
from penstock.planner.contract.config.resolve_hardware import hardware_from, hardware_mapping
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import Card, HardwareProfile
from penstock.planner.contract.given.links import Links
from penstock.planner.contract.plan.planfile import check_plan, read_plan, write_plan
from penstock.planner.contract.plan.tier_fill import fills
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.ranks.host_shares import host_shares
from penstock.planner.contract.ranks.rank_share import share_of_rank
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.explain.explanation import explain, question_of
from penstock.planner.solver import layer_counts
from penstock.planner.solver.layer_counts import slowest, with_counts
from penstock.planner.solver.ranks_choice import answer_dealt
from penstock.planner.solver.terms.problem import Question
from tests.cli import command, refusal, remembered
from tests.planner.small import GB, MB, gpu, machine, model, work
from tests.planner.test_simulate_ranks import as_promised


def slower(times: float, compute: float = 1.0) -> Any:
    """A card whose link has 1 / ``times`` of the usual rate, and which computes at 1 / ``compute`` of it."""
    usual = gpu()
    link = Curve(tuple((size, rate / times) for size, rate in usual.h2d.points))
    rates = {name: getattr(usual, name) / compute for name in ("dense_tflops", "attention_tflops", "memory_gbps")}
    return gpu(name="slower", h2d=link, d2h=link, **rates)


def unlike(vram: int, *others: Card, **change: Any) -> HardwareProfile:
    devices = (0, *(card.device for card in others))
    return machine(vram, **{"devices": devices, "others": others, "dram_bus_gbps": 400.0, "links": Links()} | change)


@pytest.fixture(scope="module", autouse=True)
def solved_once() -> Iterator[None]:
    """Numbers of layers are tried by several tests, and by commands, of the same cards: the program solves each once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_counts, "optimum", remembered(layer_counts.optimum))
        yield


CASES = {
    "links of 2 to 1": (unlike(700 * MB, Card(1, 700 * MB, slower(2))), model(layers=24), work(requests=3)),
    "more VRAM behind a slower link": (unlike(900 * MB, Card(1, 2 * GB, slower(2.4, 1.5))), model(layers=24), work(requests=3)),
    "the bus binds": (unlike(700 * MB, Card(1, 700 * MB, slower(2)), dram_bus_gbps=60.0), model(layers=24), work(requests=3)),
    "a long prompt": (unlike(2 * GB, Card(1, 2 * GB, slower(2, 3))), model(layers=24), work(prompt_tokens=8192, new_tokens=8)),
    "all resident": (unlike(4 * GB, Card(1, 4 * GB, slower(1, 2))), model(layers=40), work(prompt_tokens=4096, new_tokens=8)),
    "two of three": (
        unlike(700 * MB, Card(1, 700 * MB, slower(2)), devices=(0, 1, 2), dram=64 * GB),
        model(layers=25),
        work(requests=3),
    ),
}


WHOLE = 0.055
"""Of a prompt as a whole, whose copies and computing take about as long; which of whole and parts is chosen is 0.3 % of all seconds."""


@pytest.mark.parametrize(("hardware", "whole", "asked"), CASES.values(), ids=CASES)
def test_chosen_layers_are_faster_than_even_ones_and_take_what_is_promised(hardware, whole, asked) -> None:
    even = Question(hardware, whole, asked, ranks=hardware.cards)
    chosen = with_counts(even)
    plan, alike = answer_dealt(chosen), answer_dealt(even)
    assert sum(plan.dealing.counts) == whole.layers and not plan.dealing.is_even
    assert plan.prediction.total_s < alike.prediction.total_s
    assert all(broken_rules(r.hardware, r.model, r.workload, r.decisions) == [] for r in plan.each_rank)
    as_promised(plan, 0.05 if plan.decisions.prefill_part_tokens else WHOLE, 0.03)


@given(st.floats(0.4, 4), st.floats(0.4, 3), st.sampled_from([600 * MB, 1200 * MB, 2 * GB]), st.integers(5, 14))
@example(1.0, 1.4375, 1200 * MB, 5)  # where one layer more is slower, and two are faster
@settings(max_examples=6, deadline=None, derandomize=True)
def test_no_other_number_of_layers_is_faster(times, compute, vram, layers) -> None:
    question = Question(unlike(800 * MB, Card(1, vram, slower(times, compute))), model(layers=layers), work(), ranks=2)
    found = slowest(with_counts(question))
    tried = [slowest(replace(question, layers=(first, layers - first))) for first in range(1, layers)]
    assert found.total_s == pytest.approx(min(one.total_s for one in tried if one is not None), rel=0.01)


def test_cards_that_are_named_and_alike_change_nothing() -> None:
    alike = hardware_mapping(machine(700 * MB, devices=(0, 1)))
    named = alike | {"others": [{"device": 1, "vram_bytes": 700 * MB, "gpu": alike["gpu"]}]}
    assert hardware_from(build(HardwareConfig, named, "hardware")) == hardware_from(build(HardwareConfig, alike, "hardware"))


def test_a_profile_of_unlike_cards_comes_back_and_devices_name_those_that_are_used() -> None:
    whole = unlike(700 * MB, Card(1, 2 * GB, slower(2)), Card(4, 3 * GB, slower(3)))
    written = hardware_mapping(whole)
    assert hardware_from(build(HardwareConfig, written, "hardware")) == whole
    taken = hardware_from(build(HardwareConfig, written | {"devices": [4, 1, 2]}, "hardware"))
    assert [(taken.card(n).device, taken.card(n).vram_bytes) for n in range(3)] == [(4, 3 * GB), (1, 2 * GB), (2, 700 * MB)]
    assert taken.vram_bytes == 3 * GB and hardware_from(build(HardwareConfig, hardware_mapping(taken), "hardware")) == taken
    alone = hardware_from(build(HardwareConfig, written | {"devices": [1]}, "hardware"))
    assert (alone.gpu, alone.vram_bytes, alone.others) == (slower(2), 2 * GB, ())


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([{"device": 1}, {"device": 1}], r"hardware\.others\[1\]\.device=1: stands in two of them; keep one"),
        ([{"device": 1, "vram_bytes": 5}], r"hardware\.others\[0\]\.vram_bytes=5: the CUDA context alone takes 100 MB"),
        ([{"device": -1}], r"hardware\.others\[0\]\.device=-1: must be 0 or more"),
    ],
)
def test_wrong_cards_are_named(others, says) -> None:
    written = hardware_mapping(machine(700 * MB, devices=(0, 1)))
    cards = [{"vram_bytes": 700 * MB, "gpu": written["gpu"] | {"name": f"{n}"}} | card for n, card in enumerate(others)]
    with pytest.raises(UserError, match=says):
        hardware_from(build(HardwareConfig, written | {"others": cards}, "hardware"))


def test_ranks_divide_what_is_their_hosts() -> None:
    """DRAM by what each card cannot hold, the bus by what links carry; nothing is lost."""
    whole, part, dealing = unlike(700 * MB, Card(1, 2 * GB, slower(2)), hosts=2), model(layers=24), Dealing((8, 4, 8, 4))
    shares = host_shares(whole, part, dealing)
    assert sum(shares[:2]) == sum(shares[2:]) == 1 and shares[0] > shares[1]
    each = [share_of_rank(whole, 4, rank, shares[rank]) for rank in range(4)]
    assert [one.vram_bytes for one in each] == [700 * MB, 2 * GB] * 2
    assert sum(one.dram_bytes for one in each[:2]) == pytest.approx(whole.dram_bytes, abs=2)
    assert each[0].dram_bus_gbps == pytest.approx(2 * each[1].dram_bus_gbps) and each[0].dram_bus_gbps * 1.5 == pytest.approx(400)
    together = replace(whole, links=Links(Curve(((1, 55.0), (2, 66.0)))))
    assert [share_of_rank(together, 4, rank).gpu.h2d.peak for rank in range(2)] == pytest.approx([44, 22])


def test_another_rank_decides_where_the_first_ones_passes_leave_it_no_plan() -> None:
    hardware = unlike(6 * GB, Card(1, 700 * MB, slower(1.1)))
    plan = answer_dealt(Question(hardware, model(layers=24), work(prompt_tokens=8192), ranks=2, layers=(20, 4)))
    assert all(broken_rules(r.hardware, r.model, r.workload, r.decisions) == [] for r in plan.each_rank)
    assert len({one.prefill_chunk_tokens for one in plan.ranks.decided(plan.decisions)}) == 1


def test_what_unlike_cards_wait_for_is_explained_with_layers_dealt_anew() -> None:
    hardware, whole, asked = CASES["links of 2 to 1"]
    chosen = with_counts(Question(hardware, whole, asked, ranks=2))
    plan = answer_dealt(chosen)
    assert question_of(plan).layers == chosen.layers == (16, 8)
    told = explain(question_of(plan), plan, 0.1)
    assert not told.was_changed and told.base.decode_s == pytest.approx(plan.prediction.decode_s_per_token, rel=0.006)
    gains = {margin.resource.key: margin.gain for margin in told.margins}
    assert gains["pcie"] == pytest.approx(1 - 1 / 1.1, rel=0.05), "both links in proportion"
    assert gains["vram"] > 0 and gains["ssd"] == pytest.approx(0, abs=1e-3)
    bought = {purchase.offer.key: purchase for purchase in told.purchases}
    assert bought["cards"].offer.question.ranks == 3 and "links of 82.5 to 138 GB/s together" in bought["cards"].offer.name
    assert bought["cards"].gain > 0.3


def test_a_desktop_with_two_unlike_cards_is_planned_and_simulated(tmp_path: Path) -> None:
    done = command("planner", "solve", "hardware=rtx5080-rtx3090", "model=qwen3-32b", "workload.new_tokens=32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "GPU 1" in done.stdout and "NVIDIA GeForce RTX 3090" in done.stdout
    plan = read_plan(tmp_path / "plan.yaml")
    check_plan(plan)
    assert not plan.dealing.is_even and [one.hardware.gpu.name[-4:] for one in plan.each_rank] == ["5080", "3090"]
    assert fills(plan)[0].capacity_bytes in (plan.hardware.vram_bytes, plan.hardware.others[0].vram_bytes)
    write_plan(plan, tmp_path / "again.yaml")
    assert read_plan(tmp_path / "again.yaml") == plan
    as_promised(plan, 0.06, 0.03)
    one = command("planner", "solve", "hardware=rtx5080-rtx3090", "hardware.devices=[1]", "model=llama8b", "out=one.yaml", cwd=tmp_path)
    assert one.returncode == 0 and read_plan(tmp_path / "one.yaml").hardware.gpu.name == "NVIDIA GeForce RTX 3090", one.stderr
    said = refusal("planner", "solve", "hardware=rtx5080-rtx3090", "model=llama8b", "ranks=3", cwd=tmp_path)
    assert "ranks=3: rtx5080-rtx3090 has 2 GPUs for plans" in said
