"""One server from where its engine is started to where it has drained."""

from __future__ import annotations

import gc
import signal
import socket
from typing import Any

from penstock.runtime.asked.prompts import Vocabulary
from penstock.runtime.serve.dialects.model_talk import Talk
from penstock.runtime.serve.front.callers import Keys
from penstock.runtime.serve.front.front_desk import Front
from penstock.runtime.serve.front.listening import Door, Listening
from penstock.runtime.serve.front.served_as import Served, tell
from penstock.runtime.serve.front.supervise import Supervisor
from penstock.runtime.serve.routes.serve_app import serve_app


async def serve_on(sock: socket.socket, served: Served, vocabulary: Vocabulary, keys: Keys, supervisor: Supervisor) -> dict[str, Any]:
    """Answer what comes in on the listening ``sock`` until a signal comes, by what ``supervisor`` runs -> the engine's report of its whole
    life. UserError where the engine cannot serve. A signal that comes before anything was served, or another one while replies end, ends it
    as it does any other verb."""
    door = Door(served.limits)
    talk = Talk(vocabulary, served.template)
    front = Front(served.name, vocabulary, talk, supervisor, keys, served.limits, lambda: door.count)
    app = serve_app(front, served.local_only, served.origins, tell)
    server = Listening(app, door, lambda: supervisor.drain(served.drain_s), supervisor.kill, served.drain_s)
    supervisor.started().add_done_callback(lambda _: server.leave())
    gc.collect()
    gc.freeze()  # what a start made, routes and models of bodies too, lives as long as the process: no token waits while it is searched
    try:
        await server.serve([sock])
    finally:
        await supervisor.leave_off()
    if supervisor.refused is not None:
        raise supervisor.refused
    ended_by = server.came if supervisor.info is None else server.cut
    if ended_by is not None:
        signal.raise_signal(ended_by)
    return supervisor.report or {}
