"""Where a server listens, and the descriptors that it needs."""

from __future__ import annotations

import errno
import resource
import socket

from penstock.planner.common.errors import UserError

SPARE_FILES = 128
"""Descriptors beside those of connections."""


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes any. UserError where that cannot be."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"host={host}: no such address ({why}); give one of this machine, such as 127.0.0.1") from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        remedy = (
            "give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
            if error.errno == errno.EADDRNOTAVAIL
            else "choose another port, or port=0 for any"
        )
        raise UserError(f"host={host} port={port}: cannot listen there ({error.strerror}); {remedy}") from error
    return sock


def allow_files(connections: int) -> None:
    """Let this process have as many descriptors as ``connections`` need, where the system allows that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need if hard == resource.RLIM_INFINITY else min(need, hard), hard))
