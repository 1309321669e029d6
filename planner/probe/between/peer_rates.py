"""How fast the network to other hosts is: bytes a second either way, and the seconds of a hop."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes
from penstock.planner.common.peers.handshake import NoSecret, Refused, call_peer
from penstock.planner.common.peers.sealed import BrokenWords, Sealed, gbps
from penstock.planner.probe.between.peer_address import PeerAddress
from penstock.planner.probe.between.peer_server import LEAST_SECONDS

HOP_BYTES, WARM_ROUNDS, ROUNDS = 16 * 2**10, 20, 200
"""Of a token's hidden state of 8192 elements in BF16, there and back."""
PIECE_BYTES = 32 * 2**20
SECONDS = 1.0
"""For each way."""
CONNECT_S = 10.0


@dataclass(frozen=True)
class PeerRates:
    """Of the network to one host."""

    peer: str
    out_gbps: float
    in_gbps: float
    hop_s: float
    """Half of there and back, the median."""

    @property
    def gbps(self) -> float:
        """Of the slower way."""
        return min(self.out_gbps, self.in_gbps)

    def __str__(self) -> str:
        return f"{self.peer} {self.out_gbps:.3g} out {self.in_gbps:.3g} in"


@dataclass(frozen=True)
class NetworkRates:
    """Of the network between all hosts, which is as fast as the slowest."""

    each: tuple[PeerRates, ...]

    @property
    def gbps(self) -> float:
        return min(one.gbps for one in self.each)

    @property
    def hop_s(self) -> float:
        return max(one.hop_s for one in self.each)

    def origin(self, date: str) -> dict[str, str]:
        """Figure of the profile -> how it was measured."""
        rates = f"pieces of {show_bytes(PIECE_BYTES)} over TCP for {SECONDS:g} s, the slower way; GB/s: {', '.join(map(str, self.each))}"
        hops = f"{show_bytes(HOP_BYTES)} over TCP, half of there and back, median of {ROUNDS}"
        return {"network.gbps": f"measured {date}: {rates}", "network.hop_s": f"measured {date}: {hops}"}


def measure_peers(peers: Sequence[PeerAddress], secret: bytes, seconds: float = SECONDS) -> NetworkRates:
    """Of each of ``peers``, where `planner probe probe.serve=` waits; about two seconds each. UserError where one does not answer."""
    return NetworkRates(tuple(_measure(peer, secret, seconds) for peer in peers))


def _measure(peer: PeerAddress, secret: bytes, seconds: float) -> PeerRates:
    try:
        with socket.create_connection((peer.host, peer.port), CONNECT_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return timed(str(peer), call_peer(sock, secret, {"wants": "network"}), seconds)
    except NoSecret as error:
        raise UserError(f"probe.peers={peer}: {error}; set PENSTOCK_SECRET to the same on both hosts") from error
    except (BrokenWords, Refused, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"probe.peers={peer}: {why or error}; start `planner probe probe.serve={peer}` there") from error


def timed(peer: str, way: Sealed, seconds: float) -> PeerRates:
    """By ``way``, at whose other end ``peer_server.answer`` listens. Takes twice ``seconds`` and the hops."""
    way.tell({"what": "hops", "bytes": HOP_BYTES, "rounds": WARM_ROUNDS + ROUNDS})
    hops = [_round_trip(way) / 2 for _ in range(WARM_ROUNDS + ROUNDS)][WARM_ROUNDS:]
    out_gbps = _rate(way, "take", seconds)
    in_gbps = _rate(way, "give", seconds)
    way.tell({"what": "over"})
    return PeerRates(peer, out_gbps, in_gbps, median(hops))


def _round_trip(way: Sealed) -> float:
    begun = time.perf_counter()
    way.pour(HOP_BYTES, LEAST_SECONDS)
    way.drain(HOP_BYTES, LEAST_SECONDS)
    return time.perf_counter() - begun


def _rate(way: Sealed, what: str, seconds: float) -> float:
    """Of pieces, one after the other, for so long; the first one, in which the connection gets faster, is left out where there are more."""
    rates: list[float] = []
    begun = time.perf_counter()
    while not rates or time.perf_counter() < begun + seconds:
        way.tell({"what": what, "bytes": PIECE_BYTES})
        piece = time.perf_counter()
        if what == "take":
            way.pour(PIECE_BYTES, LEAST_SECONDS)
            way.hear(LEAST_SECONDS)
        else:
            way.drain(PIECE_BYTES, LEAST_SECONDS)
        rates.append(gbps(PIECE_BYTES, time.perf_counter() - piece))
    return median(rates[1:] or rates)
