"""Figures as people read them."""

from __future__ import annotations

import pytest

from penstock.planner.common.measures import show_rate, show_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2e-8, "20 ns"), (1.2e-5, "12 µs"), (0.2214, "221 ms"), (3.4, "3.4 s"), (765.2, "765 s"), (1096.87, "1097 s")],
)
def test_seconds_have_a_unit_that_suits_and_no_exponent(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0"), (0.04321, "0.0432"), (48.72, "48.7"), (999.4, "999"), (999.6, "1,000"), (1354.03, "1,354"), (5.09e5, "509,000")],
)
def test_rates_have_no_exponent(rate: float, text: str) -> None:
    assert show_rate(rate) == text
