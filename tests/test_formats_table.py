"""The table of formats, in docs/formats.md and README.md, is what the program plans and what the results say."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from penstock.planner.contract.given.formats import KNOWN_FORMATS
from tests.cli import ROOT, docs_script

PAGES = (ROOT / "docs" / "formats.md", ROOT / "README.md")
STALE = "run `make formats`"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return docs_script("formats_table")


def table(script: ModuleType, page: Path) -> dict[str, dict[str, str]]:
    """Format -> title -> cell."""
    text = page.read_text(encoding="utf-8").partition(script.BEGIN)[2].partition(script.END)[0]
    heads, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.strip().splitlines()]
    return {row[0]: dict(zip(heads[1:], row[1:], strict=True)) for row in rows}


def test_both_pages_say_the_same(script: ModuleType) -> None:
    whole, short = (table(script, page) for page in PAGES)
    assert tuple(whole) == script.FORMATS and tuple(short) == script.SHORT
    assert {name: {title: whole[name][title] for title in row} for name, row in short.items()} == short, STALE


def test_bytes_rows_and_what_was_measured_are_up_to_date(script: ModuleType) -> None:
    title, seen = script.measured()
    for name, row in table(script, PAGES[0]).items():
        form = KNOWN_FORMATS[name]
        assert float(row["bytes a weight"]) == pytest.approx(form.stored_bytes(4096, 4096) / 4096**2, abs=0.005), STALE
        assert row["rows multiplied as stored"] == script.as_stored(form), STALE
        assert row[title] == seen.get(name, script.NONE), STALE


@pytest.mark.parametrize(("name", "title"), [("INT4-128", "8B, RTX 5080"), ("FP8", "70B, RTX 5080")])
def test_what_is_planned_is_up_to_date(script: ModuleType, name: str, title: str) -> None:
    column = next(column for column in script.COLUMNS if column.title == title)
    shown = float(table(script, PAGES[0])[name][title])
    assert float(script.tokens_per_s(KNOWN_FORMATS[name], column)) == pytest.approx(shown, rel=0.005), STALE


def test_a_result_that_changes_changes_the_table(script: ModuleType, tmp_path: Path) -> None:
    document = json.loads(script.RESIDENT.read_text(encoding="utf-8"))
    next(row for row in document["rows"] if row["case"] == "int4 resident, wall")["result"] = 0.004
    (tmp_path / "changed.json").write_text(json.dumps(document), encoding="utf-8")
    assert script.measured(tmp_path / "changed.json")[1]["INT4-128"] == "250"
