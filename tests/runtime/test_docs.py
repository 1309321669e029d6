"""docs/running.md tells of every key of a report and of the engine."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from penstock.runtime.asked.run_schema import EngineConfig
from penstock.runtime.tools.modes import MODES
from tests.cli import ROOT
from tests.runtime.running import desk
from tests.support import decisions, plan_for


@pytest.fixture
def page() -> str:
    return (ROOT / "docs" / "running.md").read_text(encoding="utf-8")


def test_every_key_of_a_report_is_told_of(checkpoint: Path, tmp_path: Path, page: str) -> None:
    report = desk(tmp_path, plan_for(checkpoint, decisions(pages=8))).run(max_new_tokens=2)
    assert [key for key in report if f"`{key}`" not in page] == []


def test_every_key_of_the_engine_and_every_mode_is_told_of(page: str) -> None:
    keys = [f"engine.{key.name}" for key in fields(EngineConfig)] + list(MODES)
    assert [key for key in keys if f"`{key}`" not in page] == []
