"""The network that hosts of a run may meet on: the one that the user names."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from penstock.planner.common.errors import UserError

NAMED = "GLOO_SOCKET_IFNAME"
"""As torch.distributed reads it; NCCL's is the same unless it is set."""
NAMED_FOR_CARDS = "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("256s")


def named_address() -> str:
    """The IPv4 address of the interface that GLOO_SOCKET_IFNAME names. UserError where it names none of this host's, or one without."""
    name, there = os.environ.get(NAMED), sorted(name for _, name in socket.if_nameindex())
    if not name:
        raise UserError(
            f"several hosts: torch.distributed's sockets have no password, so they bind to a network that you name: set {NAMED} to the"
            f" interface of a private one, or of WireGuard (docs/ranks.md); this host has {', '.join(there)}"
        )
    if name not in there:
        raise UserError(f"{NAMED}={name}: this host has {', '.join(there)}; name the one of a private network (docs/ranks.md)")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, _IFREQ.pack(name.encode()[:15]))
        except OSError as error:
            raise UserError(f"{NAMED}={name}: has no IPv4 address ({error.strerror}); name one that has (docs/ranks.md)") from error
    return socket.inet_ntoa(found[20:24])
