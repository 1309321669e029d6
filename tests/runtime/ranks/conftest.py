"""Three ranks for all tests of this room: to start them takes longer than any of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.runtime.company import starting
from penstock.runtime.company.company import Company


@pytest.fixture(scope="session")
def company() -> Iterator[Company]:
    """Plans of two ranks and of three run in it; this process is rank 0. Of plans with cards the others take host memory for theirs."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(starting, "LED", "tests.runtime.ranks.led_without_card")
        made = starting.start(3)
    try:
        yield made
    finally:
        made.leave()
