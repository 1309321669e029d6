"""Words over a connection, of which each is proven to come from who has the secret, in its place, once."""

from __future__ import annotations

import hmac
import json
import socket
import time
from typing import Any

from penstock.planner.common.measures import GB

MAC = "sha256"
MAC_BYTES = 32
MOST_BYTES = 1 << 16
"""Of one message."""
_SIZE = 4
_CHUNK = 1 << 20
Words = dict[str, Any]


class BrokenWords(Exception):
    """What came is not what was sent: the connection was lost, or someone else wrote to it."""


def receive_exactly(sock: socket.socket, nbytes: int, until: float) -> bytes:
    """``nbytes`` before the monotonic clock says ``until``, however slowly they drip. BrokenWords where they do not come."""
    found = bytearray()
    while len(found) < nbytes:
        left = until - time.monotonic()
        if left <= 0:
            raise BrokenWords("nothing came in time")
        try:
            sock.settimeout(left)  # another thread may have closed it
            part = sock.recv(min(_CHUNK, nbytes - len(found)))
        except TimeoutError as error:
            raise BrokenWords("nothing came in time") from error
        except OSError as error:
            raise BrokenWords(error.strerror or str(error)) from error
        if not part:
            raise BrokenWords("the connection was closed")
        found += part
    return bytes(found)


def code(key: bytes, *parts: bytes) -> bytes:
    """HMAC of ``parts``, of which none can be taken for a piece of another: each with its length."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), MAC)


class Sealed:
    """Both ways over ``sock``, each by a key of its own; whoever replays, drops or swaps messages breaks it.

    What is said can be read on the way: it is authentic, not secret. Close ``sock`` when all is over.
    """

    def __init__(self, sock: socket.socket, out_key: bytes, in_key: bytes):
        self.sock = sock
        self._out_key, self._in_key = out_key, in_key
        self._sent = self._heard = 0

    def tell(self, words: Words) -> None:
        """UTF-8 of JSON, 64 KiB at most. OSError where nobody is there."""
        body = json.dumps(words, separators=(",", ":")).encode()
        assert len(body) <= MOST_BYTES, "a message is short"
        self.sock.sendall(len(body).to_bytes(_SIZE, "big") + code(self._out_key, self._sent.to_bytes(8, "big"), body) + body)
        self._sent += 1

    def hear(self, seconds: float) -> Words:
        """The next message. BrokenWords where none comes within ``seconds``, or what comes is not the next one."""
        until = time.monotonic() + seconds
        head = receive_exactly(self.sock, _SIZE + MAC_BYTES, until)
        size = int.from_bytes(head[:_SIZE], "big")
        if size > MOST_BYTES:
            raise BrokenWords("a message is longer than any")
        body = receive_exactly(self.sock, size, until)
        if not hmac.compare_digest(head[_SIZE:], code(self._in_key, self._heard.to_bytes(8, "big"), body)):
            raise BrokenWords("a message was not written by who has the secret")
        self._heard += 1
        words = json.loads(body)
        if not isinstance(words, dict):
            raise BrokenWords("a message has no words")
        return words

    def pour(self, nbytes: int, seconds: float) -> None:
        """``nbytes`` of zeros, which nobody proves: to time the way. BrokenWords where they do not leave within ``seconds``."""
        until, zeros = time.monotonic() + seconds, memoryview(bytes(min(_CHUNK, nbytes)))
        while nbytes:
            left = until - time.monotonic()
            if left <= 0:
                raise BrokenWords("nothing left in time")
            try:
                self.sock.settimeout(left)
                nbytes -= self.sock.send(zeros[: min(_CHUNK, nbytes)])
            except OSError as error:
                raise BrokenWords(error.strerror or "nothing left in time") from error

    def drain(self, nbytes: int, seconds: float) -> None:
        """Take what the other side pours."""
        until, room = time.monotonic() + seconds, memoryview(bytearray(min(_CHUNK, nbytes)))
        while nbytes:
            try:
                self.sock.settimeout(max(1e-3, until - time.monotonic()))
                got = self.sock.recv_into(room[: min(_CHUNK, nbytes)])
            except OSError as error:
                raise BrokenWords(error.strerror or "nothing came in time") from error
            if not got:
                raise BrokenWords("the connection was closed")
            nbytes -= got


def gbps(nbytes: int, seconds: float) -> float:
    """Of so many bytes in so many seconds."""
    return nbytes / seconds / GB
