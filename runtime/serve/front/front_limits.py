"""What one client may take of a server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.planner.common.errors import UserError


@dataclass
class FrontLimits:
    """What a request, a key and an address may take, at most. Beyond it a request is refused with the documented error object."""

    body_bytes: int = 8388608
    """Of a request's body; 413 beyond it."""
    prompt_tokens: int | None = None
    """Of a prompt; null: what the context has room for."""
    new_tokens: int | None = None
    """Of a reply; null: what the context has room for."""
    choices: int = 16
    """Replies to one prompt, `n`."""
    request_s: float = 3600.0
    """From a request's arrival to the end of its reply."""
    requests_per_key: int = 256
    """Requests under way of one API key, or of all who have none; 429 beyond it."""
    waiting_per_key: int = 256
    """Of these, requests that wait in the engine's queue."""
    queue: int | None = None
    """Requests of all keys that wait; null: as the plan says."""
    connections: int = 1024
    """Open connections. Where a new one comes, the oldest without a request is closed; the new one where all have one."""
    connections_per_address: int = 512
    """Of one address, in the same way."""
    headers_s: float = 10.0
    """Until a request's headers have come, from the connection's or the headers' beginning; 408 then."""
    body_s: float = 60.0
    """Until its body has come, from the headers on; 408 then."""
    idle_s: float = 75.0
    """That a connection is kept between two requests."""
    stalled_s: float = 60.0
    """That a client may read nothing while there is something for it; its connection is closed then."""
    quiet_s: float = 10.0
    """Without a token after which a stream sends a comment, so that nobody takes the connection for dead."""

    def check(self) -> None:
        """UserError for a limit that nothing keeps to."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not 0 < value < 2**53:
                raise UserError(f"limits.{each.name}={value}: must be above 0; set it so")
