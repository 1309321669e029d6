"""A unit's bytes lie in DRAM until it is given back, in whatever order the kinds of units are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.contract.decided.decisions import CachePolicy
from penstock.planner.contract.decided.placement import Placement, Unit
from penstock.planner.contract.policy import make_policy
from penstock.runtime.memory.arena import Arena
from penstock.runtime.moving.dram_side import DramTier
from penstock.runtime.store.base import Extent, UnitLayout
from tests.support import decisions, plan_for

LAYOUT = UnitLayout(4096, (), (Extent(Path("weights"), 0, 4096, 0),), 4096)


class WritesTheLayer:
    """Reads at once: every byte of a layer is its number."""

    def read(self, extents: Sequence[Extent], into: memoryview, done: Callable[[None], None], name: str) -> None:
        torch.frombuffer(into, dtype=torch.uint8).fill_(int(name.removeprefix("layer ")))
        done(None)


def tier_of(placement: Placement) -> tuple[DramTier, Arena]:
    layouts = {unit: LAYOUT for unit, _ in placement.units if unit.kind != "head"}
    arena = Arena(DramTier.nbytes(placement, layouts))
    pool = WritesTheLayer()
    tier = DramTier(placement, layouts, arena, 0, pool, make_policy(placement, True), {})
    tier.preload(pool)
    return tier, arena


def placed(checkpoint: Path, **made: object) -> Placement:
    return plan_for(checkpoint, decisions(gpu=True, **made), gpu=True).placement


@settings(max_examples=60, deadline=None)
@given(
    resident=st.tuples(st.integers(0, 6), st.integers(0, 6), st.just(1)),
    policy=st.sampled_from(list(CachePolicy)),
    cap=st.integers(0, 2),
    picks=st.lists(st.integers(0, 5), min_size=1, max_size=80),
)
def test_bytes_stay_until_a_unit_is_given_back(checkpoint: Path, resident: tuple, policy: CachePolicy, cap: int, picks: list[int]) -> None:
    """Units are fetched in forward order and given back in the order of their kind, as far apart as the draw has it."""
    placement = placed(checkpoint, resident=resident, policy=policy, cap=cap, hwm=cap + 3, distance=cap + 2)
    units = [u for u in placement.streamed_units if u.kind != "head"]
    if not units:
        return
    tier, arena = tier_of(placement)
    out: dict[str, deque[tuple[Unit, torch.Tensor]]] = {"attn": deque(), "ffn": deque()}

    def give_back(kind: str) -> None:
        unit, buffer = out[kind].popleft()
        assert (buffer[:4096] == unit.layer).all(), f"{unit} was overwritten while it was in use"
        tier.release(unit)

    with closing(arena):
        number = 0
        for pick in picks * 4:
            held = [kind for kind, waiting in out.items() if waiting]
            if pick < 3 and (not held or tier.arrived(units[number % len(units)])):
                unit = units[number % len(units)]
                out[unit.kind].append((unit, tier.acquire(unit)[1]))
                number += 1
            elif held:
                give_back(held[pick % len(held)])
        while held := [kind for kind, waiting in out.items() if waiting]:
            give_back(held[0])
        assert sum(map(len, tier.cache._slots._in_use.values())) <= 1, "beside the layer that was begun last, one was never left"


def test_a_layer_that_is_visited_again_before_it_was_left_stays(checkpoint: Path) -> None:
    """One streamed layer: the copier fetches it for the next pass while its last copy is on its way."""
    tier, arena = tier_of(placed(checkpoint, resident=(5, 5, 1)))
    with closing(arena):
        attn, ffn = (Unit(kind, tier.layers[0]) for kind in ("attn", "ffn"))
        for unit in (attn, ffn, attn, ffn):
            tier.acquire(unit)
        for unit in (attn, attn, ffn):
            tier.release(unit)
        assert len(tier.cache._slots._in_use[attn.layer]) == 1
        tier.release(ffn)
        assert not tier.cache._slots._in_use[attn.layer]


def test_what_lies_in_dram_need_not_be_waited_for(checkpoint: Path) -> None:
    placement = placed(checkpoint, cap=0, hwm=3, distance=2)
    tier, arena = tier_of(placement)
    with closing(arena):
        assert tier.arrived(Unit("attn", 0)) and tier.arrived(Unit("head", 0))
        assert not tier.arrived(Unit("attn", 5)), "the first fill is three layers"
        assert tier.arrived(Unit("ffn", 5)), "a layer's other units come with its first"
