"""The motor process: ``python -m penstock.runtime.serve.motor.motor FD``, where FD is its end of a socket to the front.

It is told a plan, loads it, serves until it is drained, and ends within 5 seconds of the front. Status 0 after a drain, 2 for what only the
user can mend, 1 for everything else.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import uncollected
from penstock.planner.common.outside.card_errors import CardFailed
from penstock.planner.common.strictly import build, convert
from penstock.planner.common.threads import wait_asleep
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.decided.speculating import Speculate
from penstock.planner.contract.plan.planfile import read_plan
from penstock.runtime.asked.order import check_fit
from penstock.runtime.asked.page_room import fitted, unplanned_dram_bytes
from penstock.runtime.asked.run_schema import EngineConfig, ReuseConfig, RunConfig
from penstock.runtime.company.company import seat_of_environment
from penstock.runtime.kv.disk.writer_lock import Locked
from penstock.runtime.led.launched import joined
from penstock.runtime.memory.groundwork import Groundwork
from penstock.runtime.memory.kernels import keep_few_kernels
from penstock.runtime.serve.motor.inbox import Gone, Inbox
from penstock.runtime.serve.wire.frames import Frames
from penstock.runtime.serve.wire.messages import Drain, Failed, Loading, Open, Stopped, said

PREDECESSOR_S = 10.0
"""That a motor waits for the directory of one that is about to end."""
TOLD_S = 0.2
"""Seconds between two messages of one phase of loading."""


def main() -> int:
    """Serve on the socket that the first argument names -> the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's: the front drains
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        frames = Frames(sock)
        inbox = Inbox(frames)
        try:
            asked = inbox.next(None)
            if not isinstance(asked, Open):
                return 0 if isinstance(asked, Gone | Drain) else 1
            return patiently(lambda: serve(asked, frames, inbox))
        except UserError as error:
            return _failed(frames, str(error), remedied=not isinstance(error, CardFailed))
        except ConnectionError:
            return 1  # the front has gone, as after Ctrl-C while the model loads: there is nobody to tell
        except OSError as error:
            return _failed(frames, f"{type(error).__name__}: {error}", remedied=False)
        except Exception as error:
            import traceback

            traceback.print_exc()
            return _failed(frames, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}", remedied=False)


def _failed(frames: Frames, line: str, remedied: bool) -> int:
    print(f"motor: {line}", file=sys.stderr, flush=True)
    with suppress(OSError):
        frames.send(said(Failed(line, remedied)))
    return 2 if remedied else 1


class Told:
    """Says of each phase of loading how far it is, not more often than the front can use. Leaves loading where the front has gone."""

    def __init__(self, frames: Frames):
        self._frames = frames
        self._last: tuple[str, float] = "", 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase != self._last[0] or now - self._last[1] >= TOLD_S or done >= total:
            self._last = phase, now
            self._frames.send(said(Loading(phase, done, total)))


def patiently(serve: Callable[[], int]) -> int:
    """``serve``, begun again while another process writes to ``kv.dir``: a motor whose front has gone has some seconds to end."""
    until_s = time.monotonic() + PREDECESSOR_S
    while True:
        try:
            return serve()
        except Locked:
            if time.monotonic() > until_s or seat_of_environment() is not None:  # ranks that a launcher started meet once
                raise
            time.sleep(TOLD_S)


def serve(asked: Open, frames: Frames, inbox: Inbox) -> int:
    """Load what is ``asked`` and serve it until the front drains or goes. UserError where it cannot be served; what a pass raises."""
    tell = Told(frames)
    tell("plan", 0, 1)
    cfg = RunConfig(
        plan=asked.plan,
        checkpoint=asked.checkpoint,
        adapter=asked.adapter,
        kv=build(ReuseConfig, asked.kv, "kv"),
        engine=build(EngineConfig, asked.engine, "engine"),
        speculate=convert(Speculate | None, asked.speculate, "speculate"),
        draft=asked.draft,
    )
    plan, checkpoint = check_fit(cfg, read_plan(user_path(asked.plan)))
    company, _ = joined(plan, checkpoint)
    reuse = fitted(cfg.kv, plan)
    wait_asleep()  # the front is a busy neighbour of every motor
    with Groundwork.of(plan, unplanned_dram_bytes(reuse, plan), company) as ground:
        if ground.company is not None:
            ground.company.told_elsewhere()  # the front ends a motor, and says so
        tell("imports", 0, 1)
        ground.open_card()
        with uncollected():
            from penstock.runtime.serve.motor.served import Served
        with Served(replace(cfg, kv=reuse), plan, checkpoint, ground, asked, tell) as served:
            gc.collect()
            gc.freeze()  # what a start made lives as long as the process: no pass waits while it is searched
            over = served.run(frames, inbox)
            if over:
                frames.send(said(Stopped(served.report())))
    return 0 if over else 1


if __name__ == "__main__":
    keep_few_kernels()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
