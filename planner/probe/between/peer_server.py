"""The other side of a network's measurement: `planner probe probe.serve=HOST:PORT`, started by hand."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.peers.handshake import Refused, answer_peer
from penstock.planner.common.peers.sealed import BrokenWords, Sealed
from penstock.planner.probe.between.peer_address import PeerAddress

MOST_POURED = 1 << 31
"""Bytes of one piece."""
MOST_ROUNDS = 10_000
LEAST_SECONDS = 30.0
"""For a piece, and for a peer to say what is next."""


def serve_peers(address: PeerAddress, secret: bytes, say: Callable[[str], None], peers: int | None = None) -> None:
    """Answer ``peers``, one after the other; None: until interrupted. ``say`` hears of each. UserError where nobody can wait there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address.host, address.port))
        except OSError as error:
            raise UserError(f"probe.serve={address}: {error.strerror}; name an address of this host and a free port") from error
        listening.listen()
        say(f"waiting for peers at {address}; Ctrl-C ends it")
        while peers is None or peers > 0:
            sock, (caller, _) = listening.accept()
            with sock:
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    answer(answer_peer(sock, secret, _wants).way)
                    say(f"timed with {caller}")
                    peers = None if peers is None else peers - 1
                except (BrokenWords, Refused, OSError) as error:
                    say(f"{caller} was not answered: {error}")


def _wants(words: dict[str, Any]) -> str | None:
    return None if words.get("wants") == "network" else "is no probe: start `planner probe probe.peers=` there"


def answer(way: Sealed) -> None:
    """Do what the probe at the other end says, until it says that all is over. BrokenWords for what no probe says."""
    while True:
        words = way.hear(LEAST_SECONDS)
        nbytes, rounds = _number(words, "bytes", MOST_POURED), _number(words, "rounds", MOST_ROUNDS)
        match words.get("what"):
            case "hops":
                for _ in range(rounds):
                    way.drain(nbytes, LEAST_SECONDS)
                    way.pour(nbytes, LEAST_SECONDS)
            case "take":
                begun = time.perf_counter()
                way.drain(nbytes, LEAST_SECONDS)
                way.tell({"seconds": time.perf_counter() - begun})
            case "give":
                way.pour(nbytes, LEAST_SECONDS)
            case "over":
                return
            case other:
                raise BrokenWords(f"it asks for {other!r}, which no probe does")


def _number(words: dict[str, Any], name: str, most: int) -> int:
    value = words.get(name, 0)
    if not isinstance(value, int) or not 0 <= value <= most:
        raise BrokenWords(f"it asks for {value!r} {name}, and {most} are the most")
    return value
