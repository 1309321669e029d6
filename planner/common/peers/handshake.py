"""How two processes of different hosts meet: each proves that it has the secret, and the one that was called says whether they go together.

    the one that is called   nonce
    the caller               nonce, its words, HMAC(secret, "caller", both nonces, words)
    the one that is called   its verdict, HMAC(secret, "called", both nonces, the caller's code, verdict)

Nonces are of 32 random bytes and used once, so nothing of an earlier meeting is of any use. The codes are compared in constant time. Keys
of all later words are made of the secret and both nonces.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.planner.common.peers.sealed import MAC_BYTES, MOST_BYTES, BrokenWords, Sealed, Words, code, receive_exactly

GREETING = b"penstock peers 1\n"
NONCE_BYTES = 32
PATIENCE_S = 5.0
"""For the other side to say its next words."""
_SIZE = 4


class NoSecret(BrokenWords):
    """The other side has another secret, or none."""


class Refused(Exception):
    """The other side has the secret, and does not go on with this one. The message says why."""


@dataclass(frozen=True)
class Met:
    """The other side's words, and the way to it."""

    words: Words
    way: Sealed


def answer_peer(sock: socket.socket, secret: bytes, judge: Callable[[Words], str | None]) -> Met:
    """Meet the caller at ``sock``. ``judge`` says why its words do not do, None where they do. NoSecret for a caller without it, who learns
    nothing; BrokenWords for one who says nothing; Refused, once the caller knows, for one that ``judge`` does not take."""
    until = time.monotonic() + PATIENCE_S
    nonce = secrets.token_bytes(NONCE_BYTES)
    _send(sock, GREETING + nonce)
    theirs = receive_exactly(sock, NONCE_BYTES, until)
    mac, body = _signed(sock, until)
    if not hmac.compare_digest(mac, code(secret, b"caller", nonce, theirs, body)):
        raise NoSecret("has another secret")
    words = _words(body)
    why = judge(words)
    verdict = json.dumps({"refused": why}).encode()
    _send_signed(sock, code(secret, b"called", nonce, theirs, mac, verdict), verdict)
    if why is not None:
        raise Refused(why)
    return Met(words, _sealed(sock, secret, nonce, theirs, called=True))


def call_peer(sock: socket.socket, secret: bytes, words: dict[str, Any]) -> Sealed:
    """Meet the one that ``sock`` is connected to, with ``words``. NoSecret where either side has another secret, Refused where it does not
    take the words, BrokenWords where it is no peer of ours."""
    until = time.monotonic() + PATIENCE_S
    if receive_exactly(sock, len(GREETING), until) != GREETING:
        raise BrokenWords("it speaks otherwise")
    theirs, nonce = receive_exactly(sock, NONCE_BYTES, until), secrets.token_bytes(NONCE_BYTES)
    body = json.dumps(words).encode()
    own = code(secret, b"caller", theirs, nonce, body)
    _send(sock, nonce)
    _send_signed(sock, own, body)
    try:
        mac, verdict = _signed(sock, until)
    except BrokenWords as error:
        raise NoSecret("hung up, as it does for another secret") from error
    if not hmac.compare_digest(mac, code(secret, b"called", theirs, nonce, own, verdict)):
        raise NoSecret("does not prove to have the secret")
    if (why := _words(verdict).get("refused")) is not None:
        raise Refused(str(why))
    return _sealed(sock, secret, theirs, nonce, called=False)


def _sealed(sock: socket.socket, secret: bytes, of_called: bytes, of_caller: bytes, called: bool) -> Sealed:
    ways = [code(secret, way, of_called, of_caller) for way in (b"from called", b"from caller")]
    return Sealed(sock, *(ways if called else reversed(ways)))


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.settimeout(PATIENCE_S)
        sock.sendall(data)
    except OSError as error:
        raise BrokenWords(error.strerror or str(error)) from error


def _send_signed(sock: socket.socket, mac: bytes, body: bytes) -> None:
    _send(sock, len(body).to_bytes(_SIZE, "big") + mac + body)


def _signed(sock: socket.socket, until: float) -> tuple[bytes, bytes]:
    head = receive_exactly(sock, _SIZE + MAC_BYTES, until)
    size = int.from_bytes(head[:_SIZE], "big")
    if size > MOST_BYTES:
        raise BrokenWords("its words are longer than any")
    return head[_SIZE:], receive_exactly(sock, size, until)


def _words(body: bytes) -> Words:
    words = json.loads(body)
    if not isinstance(words, dict):
        raise BrokenWords("it says nothing")
    return words
