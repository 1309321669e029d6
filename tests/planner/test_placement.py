"""Where units go: the counts of a plan, spread evenly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.contract.decided.decisions import (
    CachePolicy,
    DramWeights,
    H2dCopies,
    ResidentUnits,
    SsdReads,
    Tier,
    VramWeights,
    WeightDecisions,
)
from penstock.planner.contract.decided.placement import even, place, split
from tests.planner.small import MB, model


def weights(attn=0, ffn=0, head=0, blocks=1, cap=0, hwm=3, policy=CachePolicy.pinned, embedding=Tier.dram, slots=4):
    resident = cap if policy is CachePolicy.pinned else 0
    return WeightDecisions(
        policy,
        embedding,
        blocks,
        VramWeights(ResidentUnits(attn, ffn, head), slots, slots - 2),
        DramWeights(cap, hwm, hwm, resident),
        SsdReads(2**20, 2, 2**21),
        H2dCopies(2**24, 2),
    )


def gaps(positions, total):
    return [(b - a - 1) % total + 1 for a, b in zip(positions, positions[1:] + positions[:1], strict=True)]


@given(st.integers(1, 120), st.data())
def test_even_positions_are_distinct_and_their_gaps_differ_by_at_most_one(total, data):
    count = data.draw(st.integers(1, total))
    positions = even(count, total)
    assert len(set(positions)) == count and set(positions) <= set(range(total))
    assert max(gaps(positions, total)) - min(gaps(positions, total)) <= 1


def test_split_takes_the_count_and_leaves_the_rest_in_order():
    assert split(range(6), 2) == ([1, 4], [0, 2, 3, 5])
    assert split([], 0) == ([], [])


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 94), st.data())
def test_every_unit_has_a_tier_and_the_counts_are_the_plans(layers, data):
    attn, ffn = data.draw(st.integers(0, layers)), data.draw(st.integers(0, layers))
    through = layers - min(attn, ffn)
    cap = data.draw(st.integers(0, through))
    hwm = cap + data.draw(st.integers(3, 10))
    placed = place(model(layers), weights(attn, ffn, cap=cap, hwm=hwm), gpu=True)
    assert placed.attn.count(Tier.vram) == attn and placed.ffn.count(Tier.vram) == ffn
    assert len(placed.dram_layers) == through
    streamed = 0 if through <= hwm else through - cap
    assert len(placed.ssd_layers) == streamed and len(placed.resident_layers) == through - streamed
    if streamed:
        assert max(gaps(list(placed.ssd_layers), layers)) - min(gaps(list(placed.ssd_layers), layers)) <= 1


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 94), st.data())
def test_vram_layers_are_even_when_the_ssd_is_idle(layers, data):
    count = data.draw(st.integers(1, layers))
    placed = place(model(layers), weights(count, count, cap=layers - count, hwm=layers - count + 3), gpu=True)
    whole = [i for i in range(layers) if i not in placed.dram_layers]
    assert max(gaps(whole, layers)) - min(gaps(whole, layers)) <= 1


def test_layers_that_miss_one_unit_are_left_to_the_ssd_first():
    placed = place(model(10, attn=40 * MB, ffn=120 * MB), weights(attn=4, cap=2, hwm=5), gpu=True)
    assert sum(placed.attn[i] is Tier.vram for i in placed.ssd_layers) == 4
    assert placed.ssd_bytes_per_pass == 8 * 160 * MB - 4 * 40 * MB


def test_a_rolling_cache_keeps_no_layer():
    placed = place(model(80), weights(cap=50, hwm=55, policy=CachePolicy.rolling), gpu=True)
    assert len(placed.ssd_layers) == 80 and not placed.resident_layers


def test_the_cpu_computes_from_dram_and_streams_nothing_to_vram():
    placed = place(model(8), weights(cap=2, hwm=5), gpu=False)
    assert placed.h2d_bytes_per_pass == 0 and Tier.vram not in dict(placed.units).values()
    assert placed.ssd_bytes_per_pass == 6 * 160 * MB


@pytest.mark.parametrize(
    "head, embedding, dram_tables, vram_embedding",
    [(0, Tier.dram, 1, 0), (1, Tier.dram, 1, 0), (1, Tier.vram, 0, 0), (0, Tier.vram, 1, 1)],
)
def test_a_tied_table_is_held_once_per_tier(head, embedding, dram_tables, vram_embedding):
    m = model(4, tied=True)
    placed = place(m, weights(head=head, embedding=embedding), gpu=True)
    assert (placed.head_dram_bytes, placed.embed_vram_bytes) == (dram_tables * m.embed_bytes, vram_embedding * m.embed_bytes)


def test_ring_slots_go_to_the_kinds_that_stream():
    both = place(model(4), weights(slots=6), gpu=True).ring_classes
    assert both == {"attn": (3, 40 * MB), "ffn": (3, 120 * MB)}
    odd = place(model(4), weights(slots=5), gpu=True).ring_classes
    assert odd == {"attn": (3, 40 * MB), "ffn": (2, 120 * MB)}
    assert place(model(4), weights(attn=4, head=1, slots=6), gpu=True).ring_classes == {"ffn": (6, 120 * MB)}
    assert place(model(4), weights(attn=4, ffn=4, head=1), gpu=True).ring_classes == {}


def test_models_of_one_name_and_other_units_are_placed_each_by_its_own():
    sizes = [place(model(8, ffn=ffn), weights(cap=2, hwm=5), gpu=True).ssd_bytes_per_pass for ffn in (120 * MB, 240 * MB)]
    assert sizes == [6 * 160 * MB, 6 * 280 * MB]
