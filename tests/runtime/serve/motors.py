"""A motor that serves in a thread of the test, and the front's end of its socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.asked.page_room import fitted
from penstock.runtime.asked.run_schema import ReuseConfig, RunConfig
from penstock.runtime.company.company import Company
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.memory.ground import OpenCard
from penstock.runtime.serve.motor.inbox import Inbox
from penstock.runtime.serve.motor.served import Served
from penstock.runtime.serve.motor.serving_loop import Steps
from penstock.runtime.serve.wire.frames import Frames
from penstock.runtime.serve.wire.messages import (
    Began,
    Drain,
    Open,
    Over,
    Pass,
    PromptLogprobs,
    Refused,
    Sampled,
    Stopped,
    Submit,
    heard,
    said,
)
from tests.runtime.sessions import CPU
from tests.support import decisions, plan_for, workload

GREEDY = Sampled(temperature=0)
WAIT_S = 60


def serving_plan(checkpoint: Path, rows: int = 4, pages: int = 24, chunk: int = 8, **more: Any) -> Plan:
    """``rows`` sequences over ``pages`` pages of 16 tokens; a pass carries ``rows`` * ``chunk`` tokens."""
    made = decisions(batch=rows, pages=pages, prefill_chunk_tokens=chunk, **more)
    return plan_for(checkpoint, made, gpu=bool(more.get("gpu")), work=workload(batch=rows, prompt_tokens=64, new_tokens=32, requests=rows))


@dataclass
class Heard:
    """What was told of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    over: dict[int, Over] = field(default_factory=dict)
    began: Began | None = None
    prompt: list[Any] = field(default_factory=list)
    refused: Refused | None = None


class Front:
    """Says and hears. ``heard`` grows as messages come."""

    def __init__(self, sock: socket.socket, ended: Sequence[Any] = ()):
        """``ended``: what the motor's loop returned, or raised, once it has."""
        self._frames, self._sock, self._ended = Frames(sock), sock, ended
        sock.settimeout(WAIT_S)
        self.requests: dict[int, Heard] = {}
        self.others: list[Any] = []

    def say(self, *messages: Any) -> None:
        for message in messages:
            if isinstance(message, Submit):
                self.requests[message.id] = Heard()
        self._frames.send(*map(said, messages))

    def hear(self, until: Callable[[], bool]) -> None:
        """Everything, as far as ``until`` holds."""
        while not until():
            data = self._frames.receive()
            assert data is not None, f"the motor has gone: {self._ended!r}"
            self._note(heard(data))

    def answers(self, *submits: Submit) -> list[Heard]:
        """All replies of ``submits``, which are said at once."""
        self.say(*submits)
        self.wait(*submits)
        return [self.requests[submit.id] for submit in submits]

    def wait(self, *submits: Submit) -> None:
        self.hear(lambda: all(self._is_over(submit) for submit in submits))

    def drain(self) -> Mapping[str, Any]:
        """The report."""
        self.say(Drain())
        self.hear(lambda: any(isinstance(message, Stopped) for message in self.others))
        return self.others[-1].report

    def close(self) -> None:
        self._sock.close()

    def _is_over(self, submit: Submit) -> bool:
        one = self.requests[submit.id]
        return one.refused is not None or len(one.over) == submit.n

    def _note(self, message: Any) -> None:
        one = self.requests.get(getattr(message, "id", -1), Heard())
        if isinstance(message, Pass):
            for chosen in message.chosen:
                one = self.requests.get(chosen.id, Heard())
                one.tokens.setdefault(chosen.reply, []).extend(chosen.tokens)
                one.logprobs.setdefault(chosen.reply, []).extend(chosen.logprobs or [])
        elif isinstance(message, Over):
            assert message.index not in one.over, "over twice"
            one.over[message.index] = message
            one.tokens.setdefault(message.index, [])
        elif isinstance(message, Began):
            assert one.began is None, "began twice"
            one.began = message
        elif isinstance(message, PromptLogprobs):
            one.prompt += message.rows
        elif isinstance(message, Refused):
            one.refused = message
        else:
            self.others.append(message)


@dataclass
class Motor:
    front: Front
    served: Served
    ended: list[Any]
    """What the loop returned, or raised."""
    thread: threading.Thread


@contextmanager
def motor(
    plan: Plan,
    checkpoint: Path,
    copier: CopyDevice | None = None,
    kv: ReuseConfig | None = None,
    device: torch.device = CPU,
    company: Company | None = None,
    around: Callable[[Steps], Steps] = lambda step: step,
    **keys: Any,
) -> Iterator[Motor]:
    """A loaded motor; drained at the end, unless the front has gone. ``around`` its steps lies what a test puts there."""
    ours, theirs = socket.socketpair()
    cfg = RunConfig(plan="", kv=fitted(kv or ReuseConfig(), plan))
    ended: list[Any] = []
    with ours, theirs, Served(cfg, plan, checkpoint, OpenCard(copier, device, company), Open("", **keys)) as served:
        frames = Frames(theirs)
        inbox = Inbox(frames, end=lambda: None)
        served.session.step = around(served.session.step)  # type: ignore[method-assign]

        def serve() -> None:
            try:
                over = served.run(frames, inbox)
                ended.append(over)
                if over:
                    frames.send(said(Stopped(served.report())))
            except BaseException as error:
                ended.append(error)
                with suppress(OSError):
                    theirs.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=serve)
        thread.start()
        front = Front(ours, ended)
        try:
            yield Motor(front, served, ended, thread)
        finally:
            if not ended and ours.fileno() >= 0:
                front.say(Drain())
                front.hear(lambda: any(isinstance(message, Stopped) for message in front.others))
            inbox.close()
            thread.join(WAIT_S)


def alone(served: Served, prompt: list[int], new_tokens: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """What ``Session.generate`` says to ``prompt`` alone, greedily, once the motor holds no page any more."""
    pool, until_s = served.session.engine.kv.pages, time.monotonic() + WAIT_S
    while pool.available < pool.slots:
        assert time.monotonic() < until_s, "pages are held by nobody"
        time.sleep(0.001)
    chunk = served.session.plan.decisions.prefill_chunk_tokens
    made = served.session.generate(Batch([prompt], new_tokens, chunk, stop_ids), Sampler(Sampling(), served.session.device), reuse=False)
    return made.tokens[0]


def submit(id: int, prompt: list[int], new_tokens: int = 8, **more: Any) -> Submit:
    return replace(Submit(id, prompt, new_tokens, GREEDY), **more)
