"""The front's process: the engine is started beside the imports of what answers. It computes nothing, so that it has no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.planner.common.interrupt import uncollected
from penstock.planner.contract.checkpoint.gguf_checkpoint import vocabulary_file
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.serve.front.callers import Keys
from penstock.runtime.serve.front.listen_address import allow_files, bound
from penstock.runtime.serve.front.motor_process import start_motor
from penstock.runtime.serve.front.served_as import Served, tell
from penstock.runtime.serve.front.supervise import Supervisor
from penstock.runtime.serve.large_apart import keep_large_apart
from penstock.runtime.serve.torchless import leave_torch_out
from penstock.runtime.serve.wire.messages import Loading, Open
from penstock.runtime.told.progress import PhaseBar

if TYPE_CHECKING:
    from penstock.runtime.asked.prompts import Vocabulary


def serve(served: Served, plan: Plan, checkpoint: Path, opening: Open, cannot_return: str = "") -> dict[str, Any]:
    """Listen until a signal comes -> the engine's report of its whole life. UserError for keys, an address or a tokenizer that are no good,
    and where the engine cannot serve, or ``cannot_return`` once it has ended."""
    keep_large_apart()
    keys = Keys(()) if served.keys is None else Keys.read(served.keys)
    allow_files(served.limits.connections)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each client that went while something was sent to it
    with contextlib.closing(bound(served.host, served.port)) as sock:
        host = f"[{served.host}]" if ":" in served.host else served.host
        if served.keys is not None and served.keys.stat().st_mode & 0o077:
            tell(f"keys={served.keys}: other users of this machine can read it; chmod 600 it")
        tell(f"listening on http://{host}:{sock.getsockname()[1]}; /ready says when {served.name} is loaded")
        return asyncio.run(_serve(sock, served, keys, opening, cannot_return, lambda: _vocabulary(checkpoint, plan)))


async def _serve(
    sock: socket.socket, served: Served, keys: Keys, opening: Open, cannot_return: str, read: Callable[[], Vocabulary]
) -> dict[str, Any]:
    """Connections that come before the imports are done wait for them."""
    bar = PhaseBar()

    def loading(told: Loading | None) -> None:
        if told is None:
            bar.rest()
            tell(f"{served.name} is loaded")
        else:
            bar(told.phase, told.done, told.total)

    supervisor = Supervisor(start_motor, opening, tell, served.hang_s, loading, cannot_return)
    supervisor.started()
    try:
        vocabulary = await asyncio.to_thread(read)
        from penstock.runtime.asked.chat_template import find_template
        from penstock.runtime.serve.routes.serving import serve_on

        find_template(vocabulary.tokenizer, served.template)  # an option that the template does not have ends the start
        return await serve_on(sock, served, vocabulary, keys, supervisor)
    except BaseException:
        supervisor.kill()
        raise
    finally:
        await supervisor.leave_off()
        bar.rest()


def _vocabulary(checkpoint: Path, plan: Plan) -> Vocabulary:
    """Imports all that answers, for seconds. A GGUF file's vocabulary is read by code of transformers that imports torch."""
    if vocabulary_file(checkpoint) is None:
        leave_torch_out()
    with uncollected():
        from penstock.runtime.asked.prompts import read_vocabulary
        from penstock.runtime.serve.routes import serving  # noqa: F401

    return read_vocabulary(checkpoint, plan.model.vocab)
