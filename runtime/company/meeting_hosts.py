"""How the hosts of a run meet before torch is imported: the first rank of each proves that it has the secret, and says what it has."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import ExitStack

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.streams import tell
from penstock.planner.common.peers.handshake import NoSecret, Refused, answer_peer, call_peer
from penstock.planner.common.peers.sealed import BrokenWords
from penstock.planner.common.peers.shared_secret import shared_secret
from penstock.runtime.company.host_claims import HostClaims
from penstock.runtime.company.host_line import HostLine, OtherHost
from penstock.runtime.company.interface import named_address

PORT = "PENSTOCK_PORT"
"""Where rank 0 waits for the first ranks of the other hosts; by default the port behind MASTER_PORT."""
MEETING_S = 60.0
"""For all to come: their launchers have met before."""
_AGAIN_S = 0.2


def meet(claims: HostClaims, own: str, port: int, rank0: str, secret: bytes, patience_s: float = MEETING_S) -> HostLine:
    """The line to the other hosts, once all agree: rank 0 waits at ``own``, the others call ``rank0`` from there. UserError where a host
    has no secret, or another one, or another version, plan or checkpoint."""
    if claims.rank == 0:
        return HostLine(_await_all(claims, own, port, secret, patience_s))
    return HostLine([_call(claims, own, rank0, port, secret, patience_s)])


def meet_by_environment(claims: HostClaims) -> HostLine:
    """The same, by what the launcher and the user say in the environment."""
    return meet(claims, named_address(), _port(), os.environ.get("MASTER_ADDR", ""), shared_secret())


def _port() -> int:
    said = os.environ.get(PORT) or os.environ.get("MASTER_PORT", "")
    if not said.isdecimal() or not 0 < int(said) < 65535:
        raise UserError(f"{PORT}={said}: must be a port, 1 to 65534; leave it out for the one behind MASTER_PORT, which torchrun sets")
    return int(said) + (PORT not in os.environ)


def _await_all(claims: HostClaims, own: str, port: int, secret: bytes, patience_s: float) -> list[OtherHost]:
    """Rank 0's part."""
    expected, until = claims.count // claims.on_host - 1, time.monotonic() + patience_s
    met: dict[int, OtherHost] = {}
    strangers: dict[str, str] = {}

    def judge(words: dict[str, object]) -> str | None:
        if words.get("rank") in met:
            return f"says that its first rank is {words['rank']}, as another host did; start torchrun with another --node-rank on each"
        return claims.differs(words)

    with ExitStack() as kept, _listening(own, port) as listening:
        while len(met) < expected:
            listening.settimeout(max(0.01, until - time.monotonic()))
            try:
                sock, (address, _) = listening.accept()
            except TimeoutError as error:
                heard = "".join(f"; {where} {why}" for where, why in strangers.items())
                raise UserError(
                    f"{expected - len(met)} of {expected} other hosts did not come to {own}:{port} within {patience_s:g} s{heard}"
                ) from error
            try:
                peer = answer_peer(kept.enter_context(sock), secret, judge)
            except Refused as refused:
                raise UserError(f"the host at {address} {refused}") from refused
            except BrokenWords as broken:
                sock.close()
                strangers[address] = str(broken)
                tell(f"runtime: {address} was not let in: {broken}")
                continue
            first = int(peer.words["rank"])
            met[first] = OtherHost(str(peer.words["host"]), range(first, first + claims.on_host), peer.way)
        for one in met.values():
            one.way.tell({"met": claims.host})
        kept.pop_all()
    return list(met.values())


def _listening(own: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((own, port))
    except OSError as error:
        listening.close()
        raise UserError(f"rank 0 cannot wait at {own}:{port} ({error.strerror}); set {PORT} to a free port, on all hosts") from error
    listening.listen(64)
    return listening


def _call(claims: HostClaims, own: str, rank0: str, port: int, secret: bytes, patience_s: float) -> OtherHost:
    """The part of each other host."""
    until, where = time.monotonic() + patience_s, f"rank 0 at {rank0}:{port}"
    sock = _connected(own, rank0, port, until)
    try:
        way = call_peer(sock, secret, claims.words())
        name = str(way.hear(max(0.01, until - time.monotonic())).get("met"))
    except Refused as refused:
        sock.close()
        raise UserError(f"{where} refused this host, which {refused}") from refused
    except NoSecret as stranger:
        sock.close()
        raise UserError(f"{where} {stranger}; set PENSTOCK_SECRET to the same on all hosts") from stranger
    except BrokenWords as broken:
        sock.close()
        raise UserError(f"{where} went away before all hosts had met ({broken}); its own line says why") from broken
    return OtherHost(name, range(claims.on_host), way)


def _connected(own: str, rank0: str, port: int, until: float) -> socket.socket:
    """From the named interface, tried again while nobody waits there yet."""
    while True:
        try:
            return socket.create_connection((rank0, port), max(0.1, until - time.monotonic()), (own, 0))
        except OSError as error:
            if time.monotonic() < until and error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
                time.sleep(_AGAIN_S)
                continue
            why = error.strerror or str(error)
            raise UserError(
                f"rank 0 at {rank0}:{port} does not answer from {own} ({why}); is that its address on the named network?"
            ) from error
