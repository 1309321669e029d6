"""One server from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.asked.prompts import Vocabulary, read_vocabulary
from penstock.runtime.serve.dialects.model_talk import Talk
from penstock.runtime.serve.front.callers import Keys
from penstock.runtime.serve.front.front_desk import Front
from penstock.runtime.serve.front.front_limits import FrontLimits
from penstock.runtime.serve.front.guard import tell
from penstock.runtime.serve.front.listening import Door, Listening, allow_files, bound
from penstock.runtime.serve.front.motor_process import start_motor
from penstock.runtime.serve.front.supervise import MotorProcess, Supervisor
from penstock.runtime.serve.routes.serve_app import serve_app
from penstock.runtime.serve.wire.messages import Open


@dataclass(frozen=True)
class Served:
    """How a model is served, checked already."""

    name: str
    host: str = "127.0.0.1"
    port: int = 0
    keys: Path | None = None
    local_only: bool = True
    """Only this machine's own names are answered to."""
    origins: tuple[str, ...] = ()
    drain_s: float = 30.0
    limits: FrontLimits = field(default_factory=FrontLimits)
    template: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template."""


def serve(served: Served, plan: Plan, checkpoint: Path, opening: Open) -> dict[str, Any]:
    """Listen until a signal comes -> the engine's report of its whole life. UserError for keys, an address or a tokenizer that are no good,
    and where the engine cannot serve."""
    keys = Keys(()) if served.keys is None else Keys.read(served.keys)
    if served.keys is not None and served.keys.stat().st_mode & 0o077:
        tell(f"keys={served.keys}: other users of this machine can read it; chmod 600 it")
    allow_files(served.limits.connections)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each client that went while something was sent to it
    with contextlib.closing(bound(served.host, served.port)) as sock:
        vocabulary = read_vocabulary(checkpoint, plan.model.vocab)
        host = f"[{served.host}]" if ":" in served.host else served.host
        tell(f"listening on http://{host}:{sock.getsockname()[1]}; /ready says when {served.name} is loaded")
        return asyncio.run(serve_on(sock, served, vocabulary, keys, opening, start_motor))


async def serve_on(
    sock: Any, served: Served, vocabulary: Vocabulary, keys: Keys, opening: Open, start: Callable[[], Awaitable[MotorProcess]]
) -> dict[str, Any]:
    """The same on the listening ``sock``, with motors that ``start`` starts."""
    supervisor, door = Supervisor(start, opening, tell), Door(served.limits)
    talk = Talk(vocabulary, served.template)
    front = Front(served.name, vocabulary, talk, supervisor, keys, served.limits, lambda: door.count)
    app = serve_app(front, served.local_only, served.origins, tell)
    server = Listening(app, door, lambda: supervisor.drain(served.drain_s), supervisor.kill, served.drain_s)
    running = asyncio.create_task(supervisor.run())
    running.add_done_callback(lambda _: server.leave())
    try:
        await server.serve([sock])
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    if supervisor.refused is not None:
        raise supervisor.refused
    return supervisor.report or {}
