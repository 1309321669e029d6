"""Whether to restore or to compute: each tier at its own rate, links side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import KvPages, Tier
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.kv.pages.find import Found, choose
from penstock.runtime.kv.pages.worth import Worth
from tests.support import GPU, decisions, machine, plan_for, save_tiny, workload

PAGE_BYTES = 1 << 30
"""So large that what a link takes a transfer shows."""
CARD = replace(GPU, h2d=Curve(((1, 50.0),)), memory_gbps=2000.0)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    checkpoint = save_tiny(tmp_path_factory.mktemp("worth"), layers=3)
    return plan_for(checkpoint, decisions(prefill_chunk_tokens=64), work=workload(prompt_tokens=64))


def on_card(plan: Plan, vram_pages: int = 24, dram_pages: int = 0, **changes: object) -> Plan:
    made = replace(plan.decisions, kv=KvPages(16, vram_pages, dram_pages, 0))
    return replace(plan, hardware=replace(machine(True), gpu=replace(CARD, **changes)), decisions=made)


def with_page(worth: Worth) -> Worth:
    """Rates as they are, for pages of ``PAGE_BYTES``."""
    worth._rates = replace(worth._rates, page_bytes=PAGE_BYTES, bus_gbps=float("inf"))
    return worth


def seconds(plan: Plan, pages: Mapping[Tier, int], read_gbps: float = 2.0) -> float:
    return with_page(Worth(plan, read_gbps)).restore_s(pages) / (PAGE_BYTES / GB)


def test_a_card_takes_each_tier_at_its_own_rate(plan: Plan) -> None:
    card = on_card(plan)
    assert seconds(card, {}) == seconds(card, {Tier.vram: 10}) == 0
    assert seconds(card, {Tier.vram: 10, Tier.dram: 10}) == seconds(card, {Tier.dram: 10}), "slots are shared"
    assert seconds(card, {Tier.dram: 10}) == pytest.approx(10 / 50 + 1 / 1000)
    assert seconds(card, {Tier.ssd: 10}) == pytest.approx(10 / 2 + 1 / 50 + 1 / 1000)


def test_links_work_side_by_side(plan: Plan) -> None:
    card = on_card(plan)
    assert seconds(card, {Tier.dram: 100, Tier.ssd: 1}) == pytest.approx(101 / 50 + 1 / 2 + 1 / 1000)
    assert seconds(card, {Tier.vram: 9, Tier.dram: 100, Tier.ssd: 10}) == pytest.approx(10 / 2 + 1 / 50 + 1 / 1000)


def test_layers_outside_vram_do_not_cross_the_link(plan: Plan) -> None:
    half = on_card(plan, 12, 12)
    assert seconds(half, {Tier.dram: 10}) == pytest.approx(0.5 * 10 / 10 + 0.5 / 50 + 0.5 / 1000), "a copy in DRAM, at 10 GB/s, binds"


def test_without_a_card_pages_are_read_and_copied(plan: Plan) -> None:
    assert seconds(plan, {Tier.dram: 10}) == pytest.approx(10 / 10)
    assert seconds(plan, {Tier.ssd: 10}) == pytest.approx(10 / 2 + 1 / 10)


def test_a_pass_over_streamed_weights_is_saved_whole_or_not_at_all(plan: Plan) -> None:
    """Where the link binds, a prefill of one pass takes as long for few tokens as for many."""
    slow = on_card(plan, h2d=Curve(((1, 1e-3),)))
    worth = Worth(slow, 3.0)
    whole = worth.prefill_s([64], [0])
    assert whole == worth.prefill_s([64], [48]) > 0
    chunked = Worth(replace(slow, decisions=replace(slow.decisions, prefill_chunk_tokens=16)), 3.0)
    passes = [chunked.prefill_s([64], [start]) for start in (0, 16, 48)]
    assert passes == pytest.approx([4 * whole, 3 * whole, whole])


def test_what_is_restored_is_not_computed(plan: Plan) -> None:
    worth = Worth(plan, 3.0)
    assert worth.prefill_s([64], [0]) > worth.prefill_s([64], [32]) > worth.prefill_s([64], [63]) >= worth.prefill_s([1], [0])


class Rates(Worth):
    """A second a token computed, and a page's seconds by tier."""

    def __init__(self, page_s: Mapping[Tier, float]):
        self._page = page_s

    def restore_s(self, pages: Mapping[Tier, int]) -> float:
        return sum(self._page[tier] * count for tier, count in pages.items() if tier is not Tier.vram)

    def prefill_s(self, lengths: Sequence[int], starts: Sequence[int]) -> float:
        return sum(lengths) - sum(starts)


def chosen(prompts: Mapping[str, int], tiers: Mapping[str, Tier], page_s: Mapping[Tier, float]) -> list[int]:
    """Pages of 16 tokens that each prompt gets, whose letters are its pages."""
    found = Found([[letter.encode() for letter in name] for name in prompts], {letter.encode(): tier for letter, tier in tiers.items()})
    return [len(own) for own in choose(found, Rates(page_s), list(prompts.values()), 16).wanted]


@pytest.mark.parametrize(
    ("page_s", "pages"),
    [
        ({Tier.dram: 2, Tier.ssd: 3}, 5),
        ({Tier.dram: 2, Tier.ssd: 17}, 4),
        ({Tier.dram: 17, Tier.ssd: 3}, 5),
        ({Tier.dram: 40, Tier.ssd: 40}, 2),
        ({Tier.dram: 16, Tier.ssd: 16}, 2),
    ],
)
def test_as_much_is_restored_as_pays(page_s: Mapping[Tier, float], pages: int) -> None:
    """Two pages in VRAM, two in DRAM, one on disk, and 20 tokens more. VRAM's cost nothing; a tie of the others is computed."""
    tiers = {"a": Tier.vram, "b": Tier.vram, "c": Tier.dram, "d": Tier.dram, "e": Tier.ssd}
    assert chosen({"abcde": 100}, tiers, page_s) == [pages]


def test_nothing_is_predicted_for_what_vram_has_all_of() -> None:
    found = Found([[b"a", b"b"]], {b"a": Tier.vram, b"b": Tier.vram})
    assert choose(found, None, [100], 16).wanted == [[b"a", b"b"]]


def test_a_near_page_behind_a_far_one_is_of_no_use_alone() -> None:
    tiers = {"a": Tier.ssd, "b": Tier.vram}
    assert chosen({"ab": 40}, tiers, {Tier.ssd: 40}) == [0]
    assert chosen({"ab": 40}, tiers, {Tier.ssd: 20}) == [2]


def test_each_prompt_gets_what_it_has_and_a_shared_page_is_brought_once() -> None:
    tiers = {"a": Tier.vram, "b": Tier.dram, "c": Tier.ssd}
    assert chosen({"ab": 40, "c": 40, "": 30}, tiers, {Tier.dram: 10, Tier.ssd: 17}) == [2, 0, 0]
    assert chosen({"ab": 40, "c": 40, "": 30}, tiers, {Tier.dram: 10, Tier.ssd: 15}) == [2, 1, 0]
    assert chosen({"b": 40, "bc": 40}, tiers, {Tier.dram: 31, Tier.ssd: 17}) == [1, 1], "16 tokens of each for 31 seconds"
    assert chosen({"b": 40, "bc": 40}, tiers, {Tier.dram: 33, Tier.ssd: 17}) == [0, 0]


def test_unequal_prompts_are_priced_by_the_tokens_that_are_left(plan: Plan) -> None:
    worth = Worth(plan, 3.0)
    assert worth.prefill_s([64, 32], [16, 0]) == worth.prefill_s([64, 64], [24, 24])
