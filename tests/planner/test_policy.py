"""Cache policies as state machines: what they load and evict over whole cycles of layers."""

from dataclasses import dataclass

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.planner.contract.decided.placement import split
from penstock.planner.contract.policy import Load, PinnedPolicy, RollingPolicy


@dataclass
class Pass:
    misses: int = 0
    loads: int = 0
    evicted_in_window: int = 0
    evicted: int = 0
    fewest: int = 10**9
    most: int = 0


def drive(policy, layers, passes):
    """Act the policy out and hold it to the rules of the cache; one ``Pass`` per cycle."""
    held = set(policy.preload())
    assert len(held) <= policy.hwm
    result = []
    for _ in range(passes):
        seen = Pass()
        for layer in layers:
            step = policy.access(layer)
            assert step.hit == (layer in held)
            seen.misses += not step.hit
            for action in step.actions:
                if isinstance(action, Load):
                    assert action.layer not in held, "loaded twice"
                    assert action.prefetch == (action.layer != layer)
                    held.add(action.layer)
                    seen.loads += 1
                else:
                    held.remove(action.layer)
                    seen.evicted += 1
                    seen.evicted_in_window += action.in_window
                assert len(held) <= policy.hwm, "above the high-water mark"
            assert layer in held, "computes without its weights"
            seen.fewest, seen.most = min(seen.fewest, len(held)), max(seen.most, len(held))
        result.append(seen)
    return result


def pinned(count, cap, hwm, distance):
    streamed, resident = split(range(count), count - cap)
    return PinnedPolicy(tuple(range(count)), frozenset(resident), hwm, distance), len(streamed)


@settings(max_examples=150, deadline=None)
@given(st.integers(4, 94), st.integers(0, 90), st.integers(3, 10), st.data())
def test_pinned_never_reads_more_than_the_layers_it_does_not_keep(count, cap, headroom, data):
    hwm = cap + headroom
    assume(hwm < count)
    distance = data.draw(st.integers(cap, hwm))
    policy, streamed = pinned(count, cap, hwm, distance)
    for seen in drive(policy, range(count), 4)[1:]:
        assert seen.loads <= streamed
        assert seen.evicted_in_window == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(4, 94), st.integers(0, 90), st.integers(3, 10))
def test_pinned_with_the_longest_window_reads_exactly_those_and_never_waits_for_a_prefetch(count, cap, headroom):
    hwm = cap + headroom
    assume(hwm < count)
    policy, streamed = pinned(count, cap, hwm, hwm)
    for seen in drive(policy, range(count), 4)[1:]:
        assert (seen.loads, seen.misses) == (streamed, 0)


@settings(max_examples=100, deadline=None)
@given(st.integers(4, 94), st.integers(0, 90), st.integers(3, 10), st.data())
def test_rolling_reads_every_layer_each_cycle_and_evicts_only_what_lies_behind(count, cap, headroom, data):
    hwm = cap + headroom
    assume(hwm < count)
    distance = data.draw(st.integers(max(1, cap), hwm - 1))
    for seen in drive(RollingPolicy(tuple(range(count)), cap, hwm, distance), range(count), 4)[1:]:
        assert (seen.loads, seen.misses, seen.evicted_in_window) == (count, 0, 0)


def test_the_seeds_rolling_window_stays_between_cap_and_hwm():
    for seen in drive(RollingPolicy(tuple(range(80)), 50, 55, 50), range(80), 4)[1:]:
        assert seen.fewest >= 50 and seen.most <= 55
        assert seen.evicted_in_window == 0 and seen.evicted == 80


def test_layers_that_all_fit_are_read_once():
    for policy in (RollingPolicy(tuple(range(10)), 10, 13, 12), PinnedPolicy(tuple(range(10)), frozenset(range(10)), 13, 13)):
        assert all(seen.loads == 0 and seen.misses == 0 for seen in drive(policy, range(10), 3))


def test_the_smallest_cache_streams_everything_through_three_slots():
    policy, streamed = pinned(20, 0, 3, 3)
    for seen in drive(policy, range(20), 3)[1:]:
        assert (seen.loads, seen.misses, seen.most) == (streamed, 0, 3)
