"""Hostile inputs of every kind for some seconds: `FUZZ_SECONDS=60 pytest tests/test_fuzz.py` for longer, bench/fuzz.py for as long as one
likes."""

from __future__ import annotations

import os
import random
import traceback
from pathlib import Path

import pytest

from bench import fuzz
from penstock.planner.common.errors import UserError

SECONDS = float(os.environ.get("FUZZ_SECONDS", "5"))
"""Of CPU, over all kinds."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def kinds(work: Path) -> dict[str, fuzz.Try]:
    return fuzz.kinds(work)


def test_nothing_bites(kinds: dict[str, fuzz.Try], work: Path) -> None:
    told: list[str] = []

    def bitten(kind: str, number: int, error: BaseException) -> None:
        told.append(f"{kind} {number}\n" + "".join(traceback.format_exception(error)))

    tallies = fuzz.fuzz(kinds, SECONDS, 2026, work, bitten)
    assert told == []
    assert all(t.cases == t.accepted + t.refused > 0 for t in tallies.values())


def test_what_a_fuzz_begins_with_is_sound(kinds: dict[str, fuzz.Try], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "mutated_bytes", lambda sound, chance: sound)
    monkeypatch.setattr(fuzz, "mutated_tree", lambda sound, chance: sound)
    for kind in set(kinds) - {"override"}:
        for number in range(4):
            place = tmp_path / f"{kind}{number}"
            place.mkdir()
            kinds[kind](random.Random(number), place)


def test_what_bites_is_counted_by_where_it_happened(tmp_path: Path) -> None:
    def attempt(chance: random.Random, place: Path) -> bytes:
        drawn = chance.random()
        if drawn < 0.3:
            raise UserError("refused")
        if drawn < 0.6:
            raise ZeroDivisionError
        return b""

    heard: list[BaseException] = []
    tallies = fuzz.fuzz({"any": attempt}, 0.2, 0, tmp_path, lambda kind, number, error: heard.append(error))
    tally = tallies["any"]
    assert set(tally.bites) == {"ZeroDivisionError in test_fuzz.py, attempt"}
    assert tally.cases > tally.accepted > 0 and tally.refused > 0 and sum(tally.bites.values()) == len(heard)
    rows = fuzz.document(tallies, 0.2, 0)["rows"]
    assert rows[0]["kind"] == "any" and rows[0]["bites"] == dict(tally.bites)
