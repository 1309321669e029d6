"""JSON objects over a stream socket, each behind its length in bytes: 4 bytes, big-endian."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from typing import Any

LENGTH = struct.Struct(">I")
MOST_BYTES = 1 << 30
"""Of one frame. A length above it is not one: the stream is out of step."""


ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)


class BadFrame(Exception):
    """What arrived is no frame; nothing behind it can be read."""


def packed(objects: Iterable[Mapping[str, Any]]) -> bytes:
    """One frame an object, one after the other. ValueError for one that JSON has no words for, such as NaN."""
    parts = []
    for each in objects:
        body = ENCODER.encode(each).encode()
        parts += [LENGTH.pack(len(body)), body]
    return b"".join(parts)


def length_of(head: bytes) -> int:
    """Bytes behind ``head``. BadFrame where there cannot be so many."""
    (nbytes,) = LENGTH.unpack(head)
    if nbytes > MOST_BYTES:
        raise BadFrame(f"a frame of {nbytes} bytes; {MOST_BYTES} are allowed")
    return int(nbytes)


def unpacked(body: bytes) -> dict[str, Any]:
    """The object of one frame. BadFrame where it is none."""
    try:
        found = json.loads(body)
    except ValueError as error:
        raise BadFrame(f"a frame that is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadFrame("a frame that is no JSON object")
    return found


class Frames:
    """Both directions of a connected ``sock``, which blocks and stays its giver's. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, *objects: Mapping[str, Any]) -> None:
        """All of them in one write. OSError where the other end is closed."""
        if objects:
            with self._sending:
                self._sock.sendall(packed(objects))

    def receive(self) -> dict[str, Any] | None:
        """The next object; None where the other end has closed, also in the middle of one. BadFrame, OSError."""
        head = self._exactly(LENGTH.size)
        body = None if head is None else self._exactly(length_of(head))
        return None if body is None else unpacked(body)

    def _exactly(self, nbytes: int) -> bytes | None:
        found = bytearray()
        while len(found) < nbytes:
            part = self._sock.recv(min(nbytes - len(found), 1 << 20))
            if not part:
                return None
            found += part
        return bytes(found)


class AsyncFrames:
    """The same over asyncio's streams, from one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._sending = asyncio.Lock()

    @classmethod
    async def over(cls, sock: socket.socket) -> AsyncFrames:
        """Takes the connected ``sock``: closed with this."""
        return cls(*await asyncio.open_connection(sock=sock))

    async def send(self, *objects: Mapping[str, Any]) -> None:
        """All of them in one write; returns once the socket took what its buffer does not hold. OSError where the other end is closed."""
        async with self._sending:
            self._writer.write(packed(objects))
            await self._writer.drain()

    async def receive(self) -> dict[str, Any] | None:
        """The next object; None where the other end has closed, also in the middle of one. BadFrame, OSError."""
        try:
            body = await self._reader.readexactly(length_of(await self._reader.readexactly(LENGTH.size)))
        except asyncio.IncompleteReadError:
            return None
        return unpacked(body)

    def close(self) -> None:
        """What was sent still goes out."""
        self._writer.close()

    def abort(self) -> None:
        """Close at once; what was not sent yet is forgotten."""
        self._writer.transport.abort()
