"""HOST:PORT, as it is typed."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.common.errors import UserError

_EVERY = ("", "*", "0.0.0.0", "::")
_PORT_DIGITS = 5


@dataclass(frozen=True)
class PeerAddress:
    """Where a peer waits."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def of(cls, key: str, text: str) -> PeerAddress:
        """UserError, which names ``key``, for other text, and for every address of a machine at once."""
        host, _, port = text.strip().rpartition(":")
        if not (port.isascii() and port.isdigit()) or len(port) > _PORT_DIGITS or not 0 < int(port) < 65536 or not _can_be_asked_for(host):
            raise UserError(f"{key}={text}: must be HOST:PORT, such as 10.0.0.2:29700")
        if host in _EVERY:
            raise UserError(f"{key}={text}: name the one address of this host on the network that is meant, such as 10.0.0.2:{port}")
        return cls(host, int(port))


def _can_be_asked_for(host: str) -> bool:
    """Whether the resolver takes ``host``: Python raises no OSError for a name with an empty or a long part."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return "\0" not in host
