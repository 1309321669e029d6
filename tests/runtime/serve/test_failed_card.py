"""A motor whose card failed ends as one that is begun anew; one whose plan does not fit is not."""

from __future__ import annotations

import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.card_errors import CardFailed
from penstock.runtime.serve.motor import motor
from penstock.runtime.serve.wire.messages import Failed, Open, heard


@pytest.mark.parametrize(
    ("error", "status", "remedied"), [(CardFailed("GPU 0 failed"), 1, False), (UserError("the plan takes 2 GB of VRAM"), 2, True)]
)
def test_a_motor_whose_card_failed_is_begun_anew(
    error: UserError, status: int, remedied: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def serve(*asked: Any) -> int:
        raise error

    front, back = socket.socketpair()
    sent: list[Any] = []
    monkeypatch.setattr(motor.sys, "argv", ["motor", str(back.detach())])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(motor, "Frames", lambda sock: SimpleNamespace(send=lambda data: sent.append(heard(data))))
    monkeypatch.setattr(motor, "Inbox", lambda frames: SimpleNamespace(next=lambda wait_s: Open.__new__(Open)))
    monkeypatch.setattr(motor, "serve", serve)
    with front:
        assert motor.main() == status
    assert sent == [Failed(str(error), remedied)] and capfd.readouterr().err == f"motor: {error}\n"
