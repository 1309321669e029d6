"""When ranks that follow import what they compute with."""

from __future__ import annotations

import sys

import pytest

from penstock.runtime.led import rank_process


def test_a_rank_that_follows_imports_before_it_waits_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.runtime.led as led

    module = "penstock.runtime.led.open_led"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr(led, "open_led", raising=False)
    monkeypatch.setattr("gc.freeze", lambda: None)
    company = _Company(module)
    rank_process.be_led(company)  # type: ignore[arg-type]
    assert company.did == ["join", "hear", "answer", "leave"] and company.imported


class _Company:
    """Of a rank 0 that leaves at once."""

    def __init__(self, module: str):
        self.did: list[str] = []
        self._module, self.imported = module, False

    def join(self) -> None:
        self.did.append("join")
        self.imported = self._module in sys.modules

    def hear(self) -> dict[str, str]:
        self.did.append("hear")
        return {"what": "leave"}

    def answer(self, words: dict[str, bool]) -> None:
        self.did.append("answer")

    def leave(self) -> None:
        self.did.append("leave")
