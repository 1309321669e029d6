"""Hosts of one run: those that have other things are refused before anything is loaded, and all end together. No process is started."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.peers.sealed import BrokenWords, Words
from penstock.runtime.company import host_line, meeting_hosts, starting
from penstock.runtime.company.company import Company, Seat
from penstock.runtime.company.heart import Heart
from penstock.runtime.company.host_claims import HostClaims, versions
from penstock.runtime.company.host_line import HostLine
from penstock.runtime.company.interface import named_address
from penstock.runtime.company.meeting_hosts import meet
from penstock.runtime.company.starting import enter
from tests.planner.test_peers import SECRET, both

HERE = HostClaims("a", 0, 2, 4, versions(), "plan", "weights")
THERE = replace(HERE, host="b", rank=2)
LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        return int(free.getsockname()[1])


def met(there: HostClaims, secret: bytes = SECRET, patience_s: float = 20.0) -> list[Any]:
    """What rank 0 with HERE and another host find of each other."""
    port = free_port()
    return both(
        lambda: meet(HERE, LOOPBACK, port, LOOPBACK, SECRET, patience_s), lambda: meet(there, LOOPBACK, port, LOOPBACK, secret, patience_s)
    )


class FakeHeart:
    def __init__(self) -> None:
        self.told = threading.Event()
        self.line = ""

    def when_lost(self, told: Any) -> None:
        self.tell_others = told

    def end(self, status: int, line: str) -> None:
        self.line = line
        self.told.set()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"versions": versions() | {"torch": "1.0"}}, "has torch 1.0, and a has "),
        ({"plan": "other"}, r"has another plan than a \(their digests differ\); give both the same plan="),
        ({"checkpoint": "other"}, r"has other weights than a \(their digests differ\); copy the same files to both"),
        ({"on_host": 1}, "starts 1 of 4 ranks, and a 2 of 4; give torchrun the same numbers on both"),
        ({"rank": 3}, "says that its first rank is 3; start torchrun with another --node-rank on each host"),
    ],
)
def test_a_host_that_has_other_things_is_refused_on_both_sides(other, says):
    here, there = met(replace(THERE, **other))
    assert isinstance(here, UserError) and isinstance(there, UserError)
    with pytest.raises(UserError, match=f"the host at 127.0.0.1 {says}"):
        raise here
    with pytest.raises(UserError, match=f"refused this host, which {says}"):
        raise there


def test_a_host_with_another_secret_is_not_let_in_and_the_others_are_waited_for(capfd):
    here, there = met(THERE, b"another secret of some bytes", 0.5)
    assert "1 of 1 other hosts did not come" in str(here) and "; 127.0.0.1 has another secret" in str(here)
    assert "set PENSTOCK_SECRET to the same on all hosts" in str(there)
    assert "runtime: 127.0.0.1 was not let in: has another secret" in capfd.readouterr().err


def attached() -> tuple[HostLine, HostLine, FakeHeart]:
    """Two hosts that have met, and what ends the first one."""
    here, there = met(THERE)
    assert isinstance(here, HostLine) and isinstance(there, HostLine)
    heart = FakeHeart()
    here.attach(heart)  # type: ignore[arg-type]
    there.attach(FakeHeart())  # type: ignore[arg-type]
    return here, there, heart


def test_all_hosts_end_by_the_same_line():
    _, there, heart = attached()
    there.end("rank 3 (process 7) was killed by SIGKILL; all ranks have ended")
    assert heart.told.wait(20) and heart.line == "rank 3 (process 7) was killed by SIGKILL; all ranks have ended"


def test_a_host_that_is_gone_is_named_and_one_that_leaves_is_not():
    here, there, heart = attached()
    there._others[0].way.sock.shutdown(socket.SHUT_RDWR)
    assert heart.told.wait(20) and heart.line == "host b (ranks 2 to 3) was lost: the connection was closed; all ranks have ended"
    here, there, heart = attached()
    there.leave()
    here._threads[0].join(20)
    assert not heart.told.is_set()
    here.leave()


def test_a_host_that_leaves_while_a_thread_begins_to_listen_says_nothing_of_it(monkeypatch):
    here, there, heart = attached()
    other = here._others[0]
    hear = other.way.hear

    def late(seconds: float) -> Words:
        here.leave()
        return hear(seconds)

    monkeypatch.setattr(other.way, "hear", late)
    here._listen(other)
    with pytest.raises(BrokenWords, match="Bad file descriptor"):
        hear(1.0)
    there.leave()
    assert not heart.told.is_set()


def test_a_host_that_says_nothing_any_more_is_lost(monkeypatch):
    """No connection breaks where a cable does."""
    monkeypatch.setattr(host_line, "LOADING_S", 0.2)
    port = free_port()
    here, silent = both(
        lambda: meet(HERE, LOOPBACK, port, LOOPBACK, SECRET), lambda: meeting_hosts._call(THERE, LOOPBACK, LOOPBACK, port, SECRET, 20.0)
    )
    heart = FakeHeart()
    here.attach(heart)
    silent.way.tell({"steady": False})
    assert heart.told.wait(20) and heart.line == "host b (ranks 2 to 3) was lost: nothing came in time; all ranks have ended"


@pytest.mark.parametrize("by_line", [True, False])
def test_a_rank_that_follows_tells_which_host_was_lost_where_its_watchdog_does_not(by_line, capfd):
    """Its connections break before it is ended: three times of five it ended by itself, with status 2 and without a line."""
    name, line = starting._socket_name(), "host a (rank 0) was lost: the connection was closed; all ranks have ended"
    with starting._listening(name) as listening:
        heart = Heart(name, 1)
        dog, _ = listening.accept()
        end = partial(heart.end, 2, line) if by_line else partial(dog.sendall, f"end 2 {line}\n".encode())
        with dog:
            ending = threading.Thread(target=end)
            ending.start()
            assert heart.why(20) == line
            Company(Seat(1, 2, 0, 1), heart).failed(2, "a connection broke")
            heart.leave()
            ending.join()
    assert capfd.readouterr().err == (f"runtime: {line}\n" if by_line else "")


def test_two_hosts_without_a_named_network_are_refused(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(UserError, match="set GLOO_SOCKET_IFNAME to the interface of a private one, or of WireGuard"):
        enter(Seat(1, 4, 1, 2))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wg99")
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME=wg99: this host has .*lo"):
        named_address()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert named_address() == LOOPBACK
