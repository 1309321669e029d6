"""The line of JSON at the end of a verb's output."""

from __future__ import annotations

import io
import json
import sys

import pytest

from penstock.planner.common.closing import Closing


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("wanted", [None, True, False])
def test_it_is_printed_where_it_is_wanted_and_else_where_no_person_reads(
    wanted: bool | None, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = _Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    Closing(json=wanted).close({"a": 1})
    expected = not terminal if wanted is None else wanted
    assert [json.loads(line) for line in out.getvalue().splitlines()] == ([{"a": 1}] if expected else [])
