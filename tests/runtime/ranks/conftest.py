"""Three ranks for all tests of this room: to start them takes longer than any of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.runtime.company.company import Company
from penstock.runtime.company.starting import start


@pytest.fixture(scope="session")
def company() -> Iterator[Company]:
    """Plans of two ranks and of three run in it; this process is rank 0."""
    made = start(3)
    try:
        yield made
    finally:
        made.leave()
