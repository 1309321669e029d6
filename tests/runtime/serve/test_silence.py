"""An engine that hangs without dying is found by its silence, and started anew."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict

from penstock.runtime.serve.front.api_errors import ApiError
from penstock.runtime.serve.front.asking import Word
from penstock.runtime.serve.front.motor_process import StartedMotor
from penstock.runtime.serve.front.supervise import Supervisor
from penstock.runtime.serve.wire.messages import Chosen, EngineInfo, Open, Submit
from penstock.runtime.serve.wire.silence import LEAST_S, LOOKS, TIMES, patience_s, silent
from tests.cli import HANGS_S

INFO = EngineInfo("model", "/c", 257, 512, {"rows": 4}, {}, 0.1, "1")
STUB = """
import json, socket, struct, sys, time
sock = socket.socket(fileno=int(sys.argv[1]))
def say(**body):
    body = json.dumps(body).encode()
    sock.sendall(struct.pack(">I", len(body)) + body)
say(said="Ready", info=json.loads(sys.argv[2]))
sock.settimeout(0.02)
while True:
    try:
        if b"Submit" in (sock.recv(1 << 16) or sys.exit()):
            say(said="Pass", chosen=[[1, 0, [7]]])
    except TimeoutError:
        say(said="Vital", stats={})
"""
"""A motor that is ready at once, says a token of each request and nothing of its end, and speaks of itself like a real one."""


async def start_stub() -> StartedMotor:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-S", "-c", STUB, str(theirs.fileno()), json.dumps(asdict(INFO))]
    process = await asyncio.create_subprocess_exec(*command, pass_fds=(theirs.fileno(),))
    theirs.close()
    return StartedMotor(ours, process)


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANGS_S):
        while not found():
            await asyncio.sleep(0.01)


def test_an_engine_that_stands_still_is_killed_and_started_anew() -> None:
    """SIGSTOP takes all its threads: nothing is closed, nothing is said. Before that it is slow to answer, but speaks: it is let be."""

    async def scenario() -> None:
        motors: list[StartedMotor] = []
        lines: list[str] = []

        async def start() -> StartedMotor:
            motors.append(await start_stub())
            return motors[-1]

        supervisor = Supervisor(start, Open("plan.yaml"), lines.append, hang_s=0.8)
        supervisor.started()
        try:
            await until(lambda: supervisor.state == "ready")
            mail: asyncio.Queue[Word | ApiError] = asyncio.Queue()
            supervisor.submit(Submit(1, [1], 8), mail.put_nowait)
            assert isinstance(await mail.get(), Chosen)
            heard = supervisor._words
            await until(lambda: supervisor._words > heard + 60)
            assert supervisor.restarts == 0 and mail.empty()
            os.kill(motors[0].pid, signal.SIGSTOP)
            error = await asyncio.wait_for(mail.get(), HANGS_S)
            assert isinstance(error, ApiError) and (error.status, error.code) == (503, "engine_ended")
            await until(lambda: supervisor.state == "ready")
            assert supervisor.restarts == 1 and len(motors) == 2 and await motors[0].ended() == -signal.SIGKILL
            assert lines[0].startswith("the engine has said nothing for 1 s")
        finally:
            await supervisor.leave_off()

    asyncio.run(scenario())


def test_silence_is_counted_from_the_last_word_on() -> None:
    spoken = iter([*range(30), *[30] * (LOOKS + 1)])
    asyncio.run(silent(lambda: next(spoken), 1e-3))
    assert next(spoken, None) is None


def test_patience_is_many_of_the_longest_passes() -> None:
    assert patience_s(10.0, None) == TIMES * 10 and patience_s(0.1, None) == LEAST_S and patience_s(10.0, 3.0) == 3.0
