"""What waits for a card is begun in its order, where its seconds and cards are there, and once."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from bench.waiting import ROOT, Waiting, main, read_waiting, run_all
from penstock.planner.common.errors import UserError

HERE = Waiting("row", 0, 0, 1.0, "nothing", "python -c pass")


def waiting(name: str, code: str, **changed: object) -> Waiting:
    return replace(HERE, name=name, command=f"python -c '{code}'", **changed)  # type: ignore[arg-type]


@pytest.fixture
def where(tmp_path: Path) -> dict[str, Path]:
    return {"work": tmp_path / "work", "out": tmp_path / "out"}


def test_the_commands_name_scripts_keys_and_tests_that_exist() -> None:
    rows = read_waiting()
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        program, first, *rest = row.words(Path("work"), Path("disk"), Path("out"))
        assert row.after in {"", *(other.name for other in rows)}
        if program == "python":
            source = (ROOT / first).read_text()
            source += "".join((ROOT / "bench" / f"{name}.py").read_text() for name in re.findall(r"from bench\.(\w+) import", source))
            for word in rest:
                assert re.search(rf"\b{word.partition('=')[0]}\b", source), f"{row.name}: {word}"
        else:
            assert all((ROOT / word).exists() for word in rest if word.startswith("tests/"))


def test_a_row_that_was_measured_is_not_run_again_and_one_that_failed_is(
    where: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (waiting("good", "print(7)"), waiting("bad", "raise SystemExit(3)"))
    assert run_all(rows, where, 0, 1.0) == 1
    assert (where["out"] / "good.log").read_text() == "7\n"
    assert {name: kept["status"] for name, kept in json.loads((where["out"] / "waiting.json").read_text()).items()} == {"good": 0, "bad": 3}
    assert run_all((rows[0], waiting("bad", "pass")), where, 0, 1.0) == 0
    assert "good           not begun: done before" in capsys.readouterr().out


def test_a_row_waits_for_its_cards_its_seconds_and_the_one_before(where: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    rows = (waiting("two", "pass", cards=2), waiting("long", "pass", seconds=61.0), waiting("then", "pass", after="long"))
    assert run_all(rows, where, 1, 1.0) == 0
    printed = capsys.readouterr().out
    for why in ("wants 2 cards, here are 1", "wants 61 s, 60 are left", "wants long first"):
        assert why in printed


def test_a_row_ends_with_the_minutes(where: dict[str, Path]) -> None:
    assert run_all((waiting("endless", "import time; time.sleep(600)", seconds=0.1),), where, 0, 0.01) == 1
    assert json.loads((where["out"] / "waiting.json").read_text())["endless"]["status"] == -signal.SIGKILL


def test_a_program_of_the_project_is_begun_by_its_name(where: dict[str, Path]) -> None:
    rows = replace(HERE, name="planner", command="planner --help"), replace(HERE, name="pytest", command="pytest --version")
    assert run_all(rows, where, 0, 1.0) == 0
    assert "planner decides" in (where["out"] / "planner.log").read_text()
    assert "pytest" in (where["out"] / "pytest.log").read_text()


def test_a_list_with_a_command_that_cannot_be_begun_is_refused(tmp_path: Path) -> None:
    listed = tmp_path / "waiting.yaml"
    row = '- {name: sliced, issue: 23, cards: 1, seconds: 9, predicts: passes, command: "timeout 60 pytest -q tests"}\n'
    listed.write_text(row)
    with pytest.raises(UserError, match="^waiting.yaml: sliced begins with timeout; a command begins with python, pytest, "):
        read_waiting(listed)
    listed.write_text(row.replace("timeout 60 ", ""))
    assert [read.name for read in read_waiting(listed)] == ["sliced"]


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    first = read_waiting()[0].name
    assert main(["list=true"]) == 0
    assert capsys.readouterr().out.startswith(first)
    for arguments, names in ((["work=w"], "out: missing"), (["names=serve"], first), (["hours=1"], "minutes")):
        with pytest.raises(Exception, match=names):
            main(arguments)
