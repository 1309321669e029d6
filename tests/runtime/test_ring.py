"""No slot in use is overwritten and no unit is used before it arrived, in whatever order device, copier and compute come to run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from penstock.planner.contract.policy.turns import Turns
from tests.runtime.fakes import STREAMS, Rig, Setting


@st.composite
def settings_of_rings(draw: st.DrawFn) -> Setting:
    kinds = draw(st.text("af", min_size=1, max_size=5))
    slots = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    return Setting(
        kinds=kinds,
        slots=slots,
        distance=draw(st.integers(0, 6)),
        in_flight=draw(st.integers(1, 3)),
        chunk=draw(st.sampled_from([1, 4, 11])),
        wrap=draw(st.booleans()),
        balance=draw(st.integers(1, 5)),
        keep=draw(st.integers(0, Turns(kinds, dict(zip("af", slots, strict=True)), 1).shortest_round - 1)),
        late=draw(st.booleans()),
    )


class AnyOrder(RuleBasedStateMachine):
    """Hypothesis plays the scheduler: at every point any actor that can go on may be the next one."""

    @initialize(setting=settings_of_rings(), seed=st.integers(0, 1 << 16))
    def make(self, setting: Setting, seed: int) -> None:
        self.rig = Rig(setting, passes=3, choose=random.Random(seed).choice)

    @rule(pick=st.integers(0, 59), times=st.integers(1, 8))
    def go_on(self, pick: int, times: int) -> None:
        enabled = self.rig.enabled()
        for _ in range(times if enabled else 0):
            actor = enabled[pick % len(enabled)]
            if actor in self.rig.enabled():
                self.rig.step(actor)

    def teardown(self) -> None:
        """Whatever came before, a fair scheduler brings compute to its end: nobody waits for ever."""
        if hasattr(self, "rig"):
            run_to_the_end(self.rig, random.Random(0).choice)


AnyOrder.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
TestAnyOrder = AnyOrder.TestCase


def run_to_the_end(rig: Rig, choose: Callable[[list[str]], str]) -> None:
    while not rig.over:
        enabled = rig.enabled()
        assert enabled, f"nothing can go on at {rig.state()}"
        rig.step(choose(enabled))
    assert rig.used == list(range(len(rig.used)))


SMALL = {
    "one slot of each class": Setting("af"),
    "a window of two": Setting("af", distance=2, in_flight=2, chunk=11),
    "one class, one slot": Setting("ff", slots=(1, 1), distance=2, in_flight=2, chunk=6),
    "one class, two slots": Setting("ff", slots=(1, 2), distance=2, in_flight=1, chunk=6),
    "no wrap-around": Setting("af", distance=2, in_flight=2, chunk=11, wrap=False),
    "nothing ahead": Setting("af", distance=0, in_flight=2, chunk=11),
    "a unit kept": Setting("af", distance=2, chunk=11, keep=1),
    "two to choose from": Setting("ffa", distance=3, chunk=11, balance=2),
    "two to choose from, the SSD late": Setting("ffa", distance=3, chunk=11, balance=2, late=True),
    "a unit kept and two to choose from": Setting("af", slots=(1, 2), distance=3, chunk=11, balance=2, keep=1),
}


@pytest.mark.parametrize("case", SMALL)
def test_every_interleaving_of_two_passes_keeps_the_rules(case: str) -> None:
    """All states that any order can reach, each entered by every step of the ring that leads to it. What the device then does follows
    from the state alone, and is done once in each."""
    seen: set[tuple[int, ...]] = set()
    paths: list[tuple[str, ...]] = [()]
    ends = 0
    while paths:
        path = paths.pop()
        rig = Rig(SMALL[case], passes=2, only_when_done=True)
        rig.replay(path)
        while rig.state() not in seen:
            seen.add(rig.state())
            enabled = rig.enabled()
            ends += rig.over
            assert enabled or rig.over, f"nothing can go on after {path}"
            if not enabled:
                break
            paths += [(*path, actor) for actor in enabled[1:] if actor not in STREAMS or rig.state_after(actor) not in seen]
            path, expected = (*path, enabled[0]), rig.state_after(enabled[0])
            rig.step(enabled[0])
            assert rig.state() == expected
    assert ends and len(seen) > 300


@pytest.mark.parametrize("broken", ["copies do not wait for compute", "compute does not wait for copies", "DRAM is given back when queued"])
def test_the_rig_finds_a_ring_that_breaks_a_rule(broken: str) -> None:
    rig = Rig(Setting("af", slots=(1, 1), distance=2, in_flight=4), passes=3)
    rig.device.time_of = lambda event: 0.0
    if broken.startswith("copies"):
        rig.device.copy_waits = lambda event: None
    elif broken.startswith("compute"):
        rig.device.compute_waits = lambda event: None
    else:
        rig.device.host_waits = lambda event: None
    order = random.Random(0)
    with pytest.raises(AssertionError, match="used before its bytes arrived"):
        run_to_the_end(rig, order.choice)


@pytest.mark.parametrize("kinds", ["a", "af", "aff", "fffa", "afafaf"])
@pytest.mark.parametrize("slots", [(1, 1), (2, 3)])
def test_the_arithmetic_of_slots_is_that_of_taking_turns(kinds: str, slots: tuple[int, int]) -> None:
    counts = dict(zip("af", slots, strict=True))
    turns = Turns(kinds, counts, 1, True)
    holders: dict[tuple[str, int], int] = {}
    taken = dict.fromkeys("af", 0)
    for number in range(4 * len(kinds)):
        name = kinds[number % len(kinds)]
        place = (name, taken[name] % counts[name])
        taken[name] += 1
        assert turns.place(number) == place
        assert turns.before(number) == holders.get(place)
        holders[place] = number


def test_compute_waits_on_the_host_only_for_a_copy_that_is_not_yet_queued() -> None:
    rig = Rig(Setting("af", slots=(2, 2), distance=2, in_flight=9), passes=1)
    while "copier" in rig.enabled():
        rig.step("copier")
    for _ in range(4):
        rig.step("host")
    assert rig.ring.turns.entered == 2 and not any(rig.device.done_on.values()), "the device has not yet begun"
    assert rig.ring.stats.waits == 0


def test_a_unit_out_of_order_is_refused() -> None:
    rig = Rig(Setting("af"), passes=1)
    with pytest.raises(RuntimeError, match=r"ffn\.1 entered out of order; expected attn\.0"):
        rig.ring.enter(rig.units[1])
    with pytest.raises(RuntimeError, match="left without being entered"):
        rig.ring.leave(rig.units[0], rig.device.compute_event())


def test_with_nothing_ahead_a_unit_is_copied_when_it_is_asked_for() -> None:
    rig = Rig(Setting("af", slots=(2, 2), distance=0), passes=1)
    rig.step("host")
    assert "copier" not in rig.enabled()
    rig.step("host")
    while "copier" in rig.enabled():
        rig.step("copier")
    assert rig.copied == [0]


def before_compute_begins(setting: Setting) -> Rig:
    """All that the copier can do by then."""
    rig = Rig(setting, passes=1)
    while enabled := [actor for actor in rig.enabled() if actor != "host"]:
        rig.step(enabled[0])
    return rig


@pytest.mark.parametrize(("balance", "copied"), [(1, [0]), (2, [0, 2]), (3, [0, 2, 3])])
def test_a_balance_says_how_far_one_kind_may_be_copied_before_its_turn(balance: int, copied: list[int]) -> None:
    """Two FFN units share a slot, so the second waits for compute; the attention units behind it need not."""
    rig = before_compute_begins(Setting("ffaa", slots=(2, 1), distance=4, balance=balance))
    assert rig.copied == copied
    assert rig.ring.stats.out_of_turn == len(copied) - 1


def test_what_is_still_on_the_ssd_is_not_waited_for_while_a_unit_waits_for_its_slot() -> None:
    rig = before_compute_begins(Setting("ffaa", slots=(2, 1), distance=4, balance=4, late=True))
    assert (rig.copied, rig.source.acquired) == ([0], 2)


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_a_kept_unit_holds_its_slot_while_later_ones_are_left(keep: int) -> None:
    """Of four slots the first is given to the fifth unit."""
    rig = Rig(Setting("af", slots=(2, 2), distance=4, keep=keep), passes=3)
    while 4 not in rig.copied:
        rig.step(next((actor for actor in rig.enabled() if actor != "host"), "host"))
    assert rig.ring.turns.left == 1 + keep


@pytest.mark.parametrize(("keep", "waits"), [(0, False), (1, False), (2, True)])
def test_the_usual_margin_of_two_slots_has_room_for_one_kept_unit(keep: int, waits: bool) -> None:
    rig = Rig(Setting("af", slots=(2, 2), distance=2, keep=keep), passes=4)
    run_to_the_end(rig, lambda enabled: next((actor for actor in enabled if actor != "host"), "host"))
    assert (rig.ring.stats.slot_waits > 0) == waits


@pytest.mark.parametrize("kinds", ["af", "aff", "fffa", "f"])
@pytest.mark.parametrize("slots", [(1, 1), (2, 3)])
def test_one_unit_more_than_may_be_kept_stands_still(kinds: str, slots: tuple[int, int]) -> None:
    most = Turns(kinds, dict(zip("af", slots, strict=True)), 1).shortest_round - 1
    run_to_the_end(Rig(Setting(kinds, slots, distance=6, keep=most), passes=3 + most), random.Random(0).choice)
    with pytest.raises(AssertionError, match="nothing can go on"):
        run_to_the_end(Rig(Setting(kinds, slots, distance=6, keep=most + 1), passes=3 + most), random.Random(0).choice)
