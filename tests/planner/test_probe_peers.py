"""The network to another host, as the probe finds it: timed both ways, by those alone who have the secret, and kept by later probes."""

from __future__ import annotations

import socket

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.peers.handshake import Refused, call_peer
from penstock.planner.contract.config.resolve_hardware import hardware_from
from penstock.planner.contract.given.network import Network
from penstock.planner.probe.between import peer_rates
from penstock.planner.probe.between.peer_address import PeerAddress
from penstock.planner.probe.between.peer_rates import NetworkRates, PeerRates, measure_peers
from penstock.planner.probe.between.peer_server import serve_peers
from penstock.planner.verbs.probe_verb import _with_network
from tests.planner.test_peers import SECRET, both
from tests.planner.test_presets import hardware


@pytest.fixture
def here() -> PeerAddress:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return PeerAddress("127.0.0.1", free.getsockname()[1])


def found_of(here: PeerAddress, secret: bytes, said: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """What a caller with ``secret`` finds; one who has none comes first."""
    monkeypatch.setattr(peer_rates, "PIECE_BYTES", 1 << 20)

    def call() -> NetworkRates:
        while not said:
            pass
        with socket.create_connection((here.host, here.port)) as stranger:
            stranger.sendall(b"x" * 100)
        try:
            return measure_peers([here], secret, 0.01)
        finally:
            if secret != SECRET:
                measure_peers([here], SECRET, 0.01)

    return both(lambda: serve_peers(here, SECRET, said.append, peers=1), call)[1]


def test_the_network_to_a_peer_is_timed_and_strangers_are_not_answered(here, monkeypatch):
    said: list[str] = []
    found = found_of(here, SECRET, said, monkeypatch)
    assert isinstance(found, NetworkRates) and found.gbps > 0 and found.hop_s > 0
    assert said[1].startswith("127.0.0.1 was not answered: ") and said[2:] == ["timed with 127.0.0.1"]
    assert set(found.origin("2026-11-23")) == {"network.gbps", "network.hop_s"}


def test_a_rank_that_calls_the_probe_is_told_so_and_the_next_peer_is_answered(here, monkeypatch):
    """It has the secret, so that it is refused by name: the server ended with a traceback."""
    monkeypatch.setattr(peer_rates, "PIECE_BYTES", 1 << 20)
    said: list[str] = []

    def call() -> NetworkRates:
        while not said:
            pass
        with socket.create_connection((here.host, here.port)) as sock, pytest.raises(Refused, match="is no probe"):
            call_peer(sock, SECRET, {"host": "b", "rank": 2})
        return measure_peers([here], SECRET, 0.01)

    found = both(lambda: serve_peers(here, SECRET, said.append, peers=1), call)[1]
    assert isinstance(found, NetworkRates)
    assert said[1].startswith("127.0.0.1 was not answered: is no probe") and said[2:] == ["timed with 127.0.0.1"]


def test_another_secret_is_said_so(here, monkeypatch):
    found = found_of(here, b"another secret of some bytes", [], monkeypatch)
    assert isinstance(found, UserError) and "set PENSTOCK_SECRET to the same on both hosts" in str(found)
    with pytest.raises(UserError, match=f"probe.peers={here}: Connection refused; start `planner probe probe.serve={here}` there"):
        measure_peers([here], SECRET)


NONE = ["10.0.0.2", ":29700", "0.0.0.0:29700", "host:0", "host:x", "[::]:1x", "host:²", "a..b:29700", f"{'x' * 64}:29700"]


@pytest.mark.parametrize("text", NONE)
def test_an_address_names_one_network(text):
    with pytest.raises(UserError, match="probe.serve="):
        PeerAddress.of("probe.serve", text)


def test_the_slowest_peer_is_the_network_and_a_probe_without_peers_leaves_it_alone():
    rates = NetworkRates((PeerRates("a:1", 2.0, 1.5, 4e-5), PeerRates("b:1", 1.2, 3.0, 3e-5)))
    config = _with_network(hardware("h100"), rates, None)
    assert hardware_from(config).network == Network(1.2, 4e-5)
    again = _with_network(hardware("h100"), None, config)
    assert again.network == config.network and again.origin["network.gbps"] == config.origin["network.gbps"]
    assert hardware_from(hardware("h100")).network is None
