"""The motor process: started, listened to, started anew, drained, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

from penstock.planner.common.errors import UserError
from penstock.runtime.serve.front.api_errors import ApiError
from penstock.runtime.serve.wire.frames import AsyncFrames, BadFrame
from penstock.runtime.serve.wire.messages import (
    Cancel,
    Chosen,
    Drain,
    EngineInfo,
    Failed,
    Loading,
    Message,
    Open,
    Pass,
    Ready,
    Stopped,
    Submit,
    Vital,
    heard,
    said,
)
from penstock.runtime.serve.wire.silence import patience_s, silent

State = Literal["loading", "ready", "restarting", "draining", "stopped"]
Mail = Callable[[Message | Chosen | ApiError], None]
"""Takes what is said of one request, at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before the motor is started again: doubled each time that it ended without having been ready."""
LINGER_S = 5.0
"""That a motor may take to end once its socket is closed, and before that once all that it answered was given up."""


class MotorProcess(Protocol):
    """A motor that was started."""

    sock: socket.socket
    """This end of what it is connected by."""

    async def ended(self) -> int:
        """Its exit status, once it has ended."""

    def kill(self) -> None:
        """End it on the spot."""


class Supervisor:
    """Keeps one motor running and hands each request what the motor says of it. ``tell`` is given lines for the log, ``loading`` how far
    each motor is with its start, and None once it is ready. A motor that was ready and says nothing for ``hang_s`` (None: far longer than
    its longest pass) is killed, and started anew like one that died. One that ``cannot_return`` is not: why, in words for the user."""

    def __init__(
        self,
        start: Callable[[], Awaitable[MotorProcess]],
        opening: Open,
        tell: Callable[[str], None],
        hang_s: float | None = None,
        loading: Callable[[Loading | None], None] = lambda _: None,
        cannot_return: str = "",
    ):
        self._cannot_return = cannot_return
        self._start, self._opening, self._tell, self._hang_s, self._loading = start, opening, tell, hang_s, loading
        self._words = 0
        """Messages that were heard."""
        self.state: State = "loading"
        self.progress: Loading | None = None
        self.info: EngineInfo | None = None
        """Of the newest motor that was ready."""
        self.vital: dict[str, Any] | None = None
        self.report: dict[str, Any] | None = None
        """What a drained motor says of its whole life."""
        self.restarts = 0
        self.refused: UserError | None = None
        """Why there is no motor, where only the user can help."""
        self._mail: dict[int, Mail] = {}
        self._posted: asyncio.Queue[Message] = asyncio.Queue()
        self._process: MotorProcess | None = None
        self._frames: AsyncFrames | None = None
        self._running: asyncio.Task[None] | None = None
        self._ending = False

    def submit(self, submit: Submit, mail: Mail) -> None:
        """Send a request, of which all that is heard goes to ``mail``. ApiError 503 while no motor is ready."""
        if self.state != "ready":
            words = {
                "loading": "the model is being loaded; see /ready",
                "restarting": "the engine is being started anew; see /ready",
            }
            raise ApiError(503, words.get(self.state, "the server is shutting down"), code=self.state, retry_after_s=5)
        self._mail[submit.id] = mail
        self.post(submit)

    def post(self, message: Message) -> None:
        """Send it, soon; forgotten when there is no motor."""
        self._posted.put_nowait(message)

    def leave(self, number: int) -> None:
        """No more of this request."""
        self._mail.pop(number, None)

    def started(self) -> asyncio.Task[None]:
        """:meth:`run`, begun by the first who asks."""
        if self._running is None:
            self._running = asyncio.create_task(self.run())
        return self._running

    async def leave_off(self) -> None:
        """End the motor, if there is one, and return when it has ended."""
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running

    async def run(self) -> None:
        """Until :meth:`drain`, or until a motor is ``refused``. OSError where the first one cannot be started."""
        fruitless = 0
        while not self._ending:
            try:
                was_ready = await self._life()
            except OSError as error:
                if not self.restarts:
                    raise
                was_ready = False
                self._tell(f"the engine cannot be started: {error.strerror}")
            if self._cannot_return and not self._ending:
                self.refused = self.refused or UserError(f"the engine has ended; {self._cannot_return}")
            if self.refused is not None or self._ending:
                break
            fruitless = 1 if was_ready else fruitless + 1
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (fruitless - 1))
            self._tell(f"the engine has ended; it is started anew in {pause_s:g} s")
            self.state, self.progress, self.restarts = "restarting", None, self.restarts + 1
            await asyncio.sleep(pause_s)
        self.state = "stopped"

    async def drain(self, drain_s: float) -> None:
        """Take nothing new; return when what was under way is answered and the motor has ended. After ``drain_s`` the rest is given up, so
        that the motor keeps its pages and says its report. It ends by force where it does not then, and at once where it loads yet."""
        was, self.state, self._ending = self.state, "draining", True
        process = self._process
        if process is None:
            return
        if was == "ready":
            self.post(Drain())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.ended(), drain_s)
        else:
            process.kill()
        late = list(self._mail)
        self._fail(ApiError(503, "the server is shutting down; ask again", code="draining"))
        if late:
            for number in late:
                self.post(Cancel(number))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.ended(), LINGER_S)
        await self._end(process)

    def kill(self) -> None:
        """End the motor on the spot."""
        self._ending = True
        if self._process is not None:
            self._process.kill()

    async def _life(self) -> bool:
        """Of one motor, from its start to its end -> whether it was ready."""
        process = self._process = await self._start()
        self._posted = asyncio.Queue()
        frames = self._frames = await AsyncFrames.over(process.sock)
        self.post(self._opening)
        sending = asyncio.create_task(self._send(frames))
        watching: asyncio.Task[None] | None = None
        try:
            while (data := await frames.receive()) is not None:
                self._words += 1
                if self._hear(heard(data)) and watching is None:
                    watching = asyncio.create_task(self._watch(process, frames))
        except (OSError, BadFrame, ValueError, TypeError) as error:
            self._tell(f"the engine's socket: {type(error).__name__}")
        finally:
            sending.cancel()
            if watching is not None:
                watching.cancel()
            self._fail(ApiError(503, "the engine has ended; ask again", code="engine_ended", retry_after_s=5))
            await self._end(process)
            self._process = None
        return watching is not None

    async def _watch(self, process: MotorProcess, frames: AsyncFrames) -> None:
        """End a motor that is ready and gets on no more. While it drains, the drain's own end counts."""
        assert self.info is not None
        patience = patience_s(self.info.longest_pass_s, self._hang_s)
        await silent(lambda: self._words, patience)
        if not self._ending:
            self._tell(
                f"the engine has said nothing for {patience:.0f} s; its longest pass takes {self.info.longest_pass_s:.3g} s; it is killed"
            )
            process.kill()
            frames.abort()

    def _hear(self, message: Any) -> bool:
        """-> whether it is the word that requests may come."""
        if isinstance(message, Loading):
            self.progress = message
            self._loading(message)
        elif isinstance(message, Ready):
            self.info = message.info
            self._loading(None)
            if not self._ending:
                self.state, self.progress = "ready", None
            return True
        elif isinstance(message, Vital):
            self.vital = message.stats
        elif isinstance(message, Stopped):
            self.report = message.report
        elif isinstance(message, Failed):
            self._tell(message.message)
            if message.remedied and self.info is None:
                self.refused = UserError(message.message)
        elif isinstance(message, Pass):
            for chosen in message.chosen:
                if (mail := self._mail.get(chosen.id)) is not None:
                    mail(chosen)
        elif (mail := self._mail.get(message.id)) is not None:
            mail(message)
        return False

    def _fail(self, error: ApiError) -> None:
        """Every request that is under way ends with ``error``."""
        if self.state == "ready":
            self.state = "restarting"
        mails, self._mail = self._mail, {}
        for mail in mails.values():
            mail(error)

    async def _send(self, frames: AsyncFrames) -> None:
        """What was posted, all that is there in one write."""
        with contextlib.suppress(OSError):
            while True:
                messages = [await self._posted.get()]
                while not self._posted.empty():
                    messages.append(self._posted.get_nowait())
                await frames.send(*map(said, messages))

    async def _end(self, process: MotorProcess) -> None:
        """A motor ends by itself once its socket is closed; one that does not is killed."""
        if self._frames is not None:
            self._frames.abort()
        try:
            await asyncio.wait_for(process.ended(), LINGER_S)
        except TimeoutError:
            process.kill()
            await process.ended()
