from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.kv.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    started = Nursery()
    yield started
    started.close()
