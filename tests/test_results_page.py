"""docs/results.md is what the files under bench/results say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from bench.studies import STUDIES, Check
from tests.cli import ROOT, docs_script

RESULTS = ROOT / "bench" / "results"
SIMULATED = {"case": "half", "phase": "decode", "measured_s": 0.25, "simulated": 1.01, "own_rates": 0.99, "before": None, "closed": 1.02}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return docs_script("results_page")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RESULTS, tmp_path / "results"))


def test_no_result_names_a_place_of_the_machine_that_it_is_of() -> None:
    files = list(RESULTS.glob("*/*.json"))
    told = {file.name: re.findall(r'": "(?:/|~)[^"]*"', file.read_text(encoding="utf-8")) for file in files}
    assert files and {name: places for name, places in told.items() if places} == {}


def test_the_page_of_results_is_up_to_date(script: ModuleType) -> None:
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == script.page(), "run `make results`"


def test_every_file_of_results_is_on_the_page(script: ModuleType) -> None:
    page = script.page()
    assert [str(path) for path in RESULTS.glob("*/*") if f"(../bench/results/{path.parent.name}/{path.name})" not in page] == []


def test_no_figure_stands_in_the_words_of_the_page(script: ModuleType) -> None:
    words = [script.HEAD, *(text for study in STUDIES.values() for text in (study.title, study.says))]
    assert [found for text in words for found in re.findall(r"(?<![A-Za-z])\d+(?:\.\d+)?(?![A-Za-z])", text)] == []


def test_a_figure_that_changes_in_a_file_changes_on_the_page(script: ModuleType, copied: Path) -> None:
    path = copied / "h200" / "link.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["rows"][0] |= {"ratio": 0.123, "result": 98.76}
    path.write_text(json.dumps(document), encoding="utf-8")
    row = document["rows"][0]
    page = script.page(copied)
    assert "| 98.76 GB/s |" in page and f"{row['case']}: {row['what']} | 0.123 | {row['target']} |" in page.partition("## Each link")[0]


def test_a_file_of_no_study_is_named(script: ModuleType, copied: Path) -> None:
    (copied / "cpu" / "weather.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"weather\.json: no study is named weather; choose from link, formats, hybrid, hybrid_routed"):
        script.page(copied)


def test_a_second_file_of_a_study_has_a_section_of_its_own(script: ModuleType, copied: Path) -> None:
    shutil.copy(copied / "cpu" / "moe.json", copied / "cpu" / "moe-qwen3.json")
    (copied / "cpu" / "simulate.json").write_text(json.dumps({"rows": [SIMULATED]}), encoding="utf-8")
    page = script.page(copied)
    assert "### Experts: cpu, qwen3\n" in page and "| half | decode | 250 ms | 1.020 | 1.010 | 0.990 |" in page


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [(1.0804, "<= 1.08", True), (1.0806, "<= 1.08", False), (0.98, ">= 0.98", True), (0.01, "< 0.01", False), (1.0001, "= 1", True)],
)
def test_a_target_is_judged_by_the_figure_that_is_shown(value: float, target: str, met: bool) -> None:
    assert Check("a row", value, target).met is met


def test_every_study_has_commands(script: ModuleType) -> None:
    for study in STUDIES.values():
        assert study.commands or script.commands_of(ROOT / "bench" / study.script), study.title
