"""Processes of two hosts meet by a secret: whoever has it not, or says again what another said, is not heard."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.peers.handshake import Met, NoSecret, Refused, answer_peer, call_peer
from penstock.planner.common.peers.sealed import BrokenWords, Sealed
from penstock.planner.common.peers.shared_secret import shared_secret

SECRET = b"0123456789abcdef"


class Tap:
    """A socket that keeps what was sent through it."""

    def __init__(self, sock: socket.socket):
        self._sock, self.sent = sock, bytearray()

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self._sock.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def both(first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
    """What both do at the same time: their results, or their errors."""
    found: list[Any] = [None, None]

    def run(at: int, what: Callable[[], Any]) -> None:
        try:
            found[at] = what()
        except (BrokenWords, Refused, UserError) as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=(at, what)) for at, what in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def meeting(secret: bytes = SECRET, why: str | None = None) -> tuple[Any, Any, Tap]:
    """Of one that is called and has SECRET, and a caller with ``secret``; and what the caller sent."""
    here, there = socket.socketpair()
    tap = Tap(there)

    def called() -> Met:
        try:
            return answer_peer(here, SECRET, lambda words: why)
        except NoSecret:
            here.close()
            raise

    return *both(called, lambda: call_peer(tap, secret, {"host": "b"})), tap  # type: ignore[arg-type]


def test_both_hear_each_other_and_nobody_else():
    met, way, tap = meeting()
    assert met.words == {"host": "b"} and isinstance(way, Sealed)
    way.tell({"n": 1})
    met.way.tell({"n": 2})
    assert (met.way.hear(1), way.hear(1)) == ({"n": 1}, {"n": 2})
    before = len(tap.sent)
    way.tell({"n": 3})
    last = bytes(tap.sent[before:])
    assert met.way.hear(1) == {"n": 3}
    tap.sendall(last)
    with pytest.raises(BrokenWords, match="not written by who has the secret"):
        met.way.hear(1)
    with pytest.raises(BrokenWords, match="in time"):
        way.hear(0.01)


def test_another_secret_is_met_by_silence_and_a_refusal_by_its_reason():
    called, caller, _ = meeting(b"another secret of some bytes")
    assert isinstance(called, NoSecret) and isinstance(caller, NoSecret)
    called, caller, _ = meeting(why="has another plan")
    assert type(called) is type(caller) is Refused and str(called) == str(caller) == "has another plan"


def test_what_was_said_before_is_of_no_use():
    *_, tap = meeting()
    here, there = socket.socketpair()
    there.sendall(tap.sent)
    with pytest.raises(NoSecret):
        answer_peer(here, SECRET, lambda words: None)


def test_one_that_never_ends_its_words_is_not_waited_for():
    here, there = socket.socketpair()
    there.sendall(b"x" * 32 + (1 << 30).to_bytes(4, "big") + b"y" * 32)
    with pytest.raises(BrokenWords, match="longer than any"):
        answer_peer(here, SECRET, lambda words: None)
    there.close()
    with pytest.raises(BrokenWords):
        answer_peer(here, SECRET, lambda words: None)


def test_a_secret_is_named_long_and_nobody_elses(monkeypatch, tmp_path):
    monkeypatch.delenv("PENSTOCK_SECRET", raising=False)
    monkeypatch.delenv("PENSTOCK_SECRET_FILE", raising=False)
    with pytest.raises(UserError, match="set PENSTOCK_SECRET, or PENSTOCK_SECRET_FILE"):
        shared_secret()
    monkeypatch.setenv("PENSTOCK_SECRET", "short")
    with pytest.raises(UserError, match="PENSTOCK_SECRET: has 5 bytes"):
        shared_secret()
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    monkeypatch.setenv("PENSTOCK_SECRET_FILE", str(file))
    file.chmod(0o640)
    with pytest.raises(UserError, match="others may read it; chmod 600"):
        shared_secret()
    file.chmod(0o600)
    assert shared_secret() == SECRET
    monkeypatch.setenv("PENSTOCK_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match="No such file"):
        shared_secret()
