"""docs/keys.md is what the schemas say."""

from __future__ import annotations

from types import ModuleType

import pytest

from penstock.planner.common.command.known_keys import keys_of
from tests.cli import ROOT, docs_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return docs_script("keys_page")


def test_the_page_of_keys_is_up_to_date(script: ModuleType) -> None:
    assert (ROOT / "docs" / "keys.md").read_text(encoding="utf-8") == script.page(), "run `make keys`"


def test_every_key_of_every_verb_is_on_the_page(script: ModuleType) -> None:
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    for verb, _, schema in script.verbs():
        assert f"## {verb}\n" in page
        assert [path for path in keys_of(schema) if f"| `{path}` |" not in page and path != "notes"] == []


def test_every_key_has_a_meaning() -> None:
    lines = [line for line in (ROOT / "docs" / "keys.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines if line.endswith("|  |")] == []
