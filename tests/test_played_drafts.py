"""What bench/speculation.py says of draws: the best chain over the same ones gives what is expected of them."""

from __future__ import annotations

import pytest

from bench.speculation import ACCEPTANCES, Drawn, passes_by
from penstock.planner.contract.speculation.drafting import expected_tokens


@pytest.mark.parametrize("right", ACCEPTANCES)
@pytest.mark.parametrize("drafts", [3, 15])
def test_many_draws_give_what_is_expected(right: float, drafts: int) -> None:
    assert 40_000 / passes_by(right, drafts, 40_000) == pytest.approx(expected_tokens(right, drafts), rel=0.02)


def test_a_reply_without_drafts_takes_a_pass_a_token() -> None:
    assert passes_by(0.9, 0, 17) == 17


def test_one_chain_that_is_kept_whole_ends_a_reply_of_its_length() -> None:
    assert Drawn(1.0).kept(15) == 15 and passes_by(1.0, 15, 16) == 1 and passes_by(1.0, 15, 17) == 2
