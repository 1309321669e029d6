"""Reads and copies side by side: what each loses to the other, and when both are over."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.contract.given.hardware import SsdPoint
from penstock.planner.contract.prices.contention import Contention, contention
from tests.planner.small import gpu, machine

SHARES = st.floats(0, 0.95)
SECONDS = st.floats(0, 10)


def acted_out(both: Contention, ssd_s: float, h2d_s: float) -> tuple[float, float]:
    """Both links at their slower rates until one has nothing left; then the other alone."""
    together_s = min(ssd_s / (1 - both.ssd), h2d_s / (1 - both.h2d))
    left = [alone - (1 - lost) * together_s for alone, lost in ((ssd_s, both.ssd), (h2d_s, both.h2d))]
    return together_s + max(0.0, left[0]), together_s + max(0.0, left[1])


@given(SHARES, SHARES, SECONDS, SECONDS)
def test_both_are_over_when_acting_it_out_says_so_and_never_later_than_one_after_the_other(ssd, h2d, ssd_s, h2d_s):
    both = Contention(ssd, h2d)
    finished = both.finish(ssd_s, h2d_s)
    if ssd + h2d <= 1:
        assert finished == pytest.approx(acted_out(both, ssd_s, h2d_s), abs=1e-9)
    assert max(ssd_s, h2d_s) * (1 - 1e-9) <= max(finished) <= (ssd_s + h2d_s) * (1 + 1e-9)


@given(SHARES, SHARES, SECONDS, SECONDS)
def test_the_slower_one_is_linear_in_the_seconds_of_both(ssd, h2d, ssd_s, h2d_s):
    """What the integer program counts on."""
    both = Contention(ssd, h2d)
    linear = max(ssd_s + both.ssd_s_per_h2d_s * h2d_s, h2d_s + both.h2d_s_per_ssd_s * ssd_s)
    assert max(both.finish(ssd_s, h2d_s)) == pytest.approx(linear, abs=1e-9)


def test_seconds_at_the_rates_measured_side_by_side_are_those_seconds():
    both = Contention(0.3, 0.1)
    assert both.finish(0.7 * 2, 0.9 * 2) == pytest.approx((2.0, 2.0))


def test_shares_are_of_the_best_rate_of_each_link_alone():
    points = (SsdPoint(2**22, 4, 30.0), SsdPoint(2**24, 8, 60.0))
    found = contention(machine(ssd_read=points, gpu=gpu(h2d_while_ssd_gbps=44.0, ssd_while_h2d_gbps=45.0)))
    assert (found.ssd, found.h2d) == pytest.approx((0.25, 0.2))


@pytest.mark.parametrize(
    "hardware", [machine(vram=0), machine(gpu=gpu(h2d_while_ssd_gbps=60.0)), machine(gpu=gpu(h2d_while_ssd_gbps=55.0))]
)
def test_nothing_is_lost_without_a_gpu_nor_to_a_rate_that_is_unknown_or_no_slower(hardware):
    assert contention(hardware) == Contention()
    if hardware.gpu:
        faster = replace(hardware, gpu=replace(hardware.gpu, ssd_while_h2d_gbps=7.5))
        assert contention(faster) == Contention()
