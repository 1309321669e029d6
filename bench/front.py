"""A front alone: from the engine's knowing a token to its bytes in a client's hands, with an engine that is played.

    python bench/front.py out=front.json cases=way counts=1,8,32 passes=400 between_ms=25

`way`: in each pass all streams get a token at once, as a pass of the engine gives them. Milliseconds until each token is read, and the CPU
time that a token costs the front. `kind=chat` asks for conversations. The played engine speaks the real wire in a process of its own; so
does the front, which is a server's own. Clients read raw sockets. All three share this machine's cores: compare figures of one run only.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import multiprocessing
import os
import re
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from bench.cases import Row, chosen, run_cases  # noqa: E402
from bench.clients import CHAT, COMPLETIONS, body_of, percentile  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.sse import Address  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.runtime.serve.torchless import leave_torch_out  # noqa: E402

leave_torch_out()

from transformers import GenerationConfig, PreTrainedTokenizerFast  # noqa: E402

from penstock.runtime.asked.prompts import Vocabulary  # noqa: E402
from penstock.runtime.serve.front.callers import Keys  # noqa: E402
from penstock.runtime.serve.front.served_as import Served  # noqa: E402
from penstock.runtime.serve.front.supervise import Supervisor  # noqa: E402
from penstock.runtime.serve.front.token_texts import byte_letters  # noqa: E402
from penstock.runtime.serve.motor.inbox import Gone, Inbox  # noqa: E402
from penstock.runtime.serve.routes.serving import serve_on  # noqa: E402
from penstock.runtime.serve.wire.frames import Frames  # noqa: E402
from penstock.runtime.serve.wire.messages import (  # noqa: E402
    Began,
    Chosen,
    Drain,
    EngineInfo,
    Message,
    Open,
    Over,
    Ready,
    Stopped,
    Submit,
    said,
    together,
)

KEYS = ("out", "cases", "counts", "passes", "between_ms", "kind")
WORDS = 20_000
"""Passes that have a word of their own, by which a client knows when its token was made."""
FIRST = 1000
"""The first of these tokens."""
WORD = re.compile(rb" w(\d+)")
MOST_S = 0.002
FORK = multiprocessing.get_context("fork")


def vocabulary() -> Vocabulary:
    """Bytes, and a token for each pass."""
    known = byte_letters() | {f"Ġw{k}": FIRST + k for k in range(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    return Vocabulary(fast, frozenset(), FIRST + WORDS, GenerationConfig())


class Times:
    """When the token of each pass was known, in memory that processes share."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 8 * WORDS)

    def __setitem__(self, number: int, at: float) -> None:
        struct.pack_into("d", self._map, 8 * number, at)

    def __getitem__(self, number: int) -> float:
        return float(struct.unpack_from("d", self._map, 8 * number)[0])


def play(sock: socket.socket, times: Times, between_s: float) -> None:
    """An engine that gives each of its rows a token a pass, ``between_s`` after the last."""
    frames = Frames(sock)
    inbox, rows, count = Inbox(frames), dict[int, list[int]](), 0
    due = time.monotonic()
    while True:
        message = inbox.next(None if not rows else max(0.0, due - time.monotonic()))
        if isinstance(message, Open):
            limits = {"rows": 64, "queue": 64}
            frames.send(said(Ready(EngineInfo("played", "/", FIRST + WORDS, 1 << 20, limits, {}, 1.0, "0"))))
        elif isinstance(message, Submit):
            rows[message.id] = [0, message.new_tokens]
            frames.send(said(Began(message.id, len(message.prompt), 0)))
        elif isinstance(message, Drain | Gone):
            frames.send(said(Stopped({})))
            inbox.close()
            return
        if not rows or time.monotonic() < due:
            continue
        told: list[Message | Chosen] = []
        times[count] = at = time.monotonic()
        for number, row in list(rows.items()):
            row[0] += 1
            told.append(Chosen(number, 0, [FIRST + count], None, at))
            if row[0] == row[1]:
                told.append(Over(number, 0, "length"))
                del rows[number]
        frames.send(*map(said, together(told)))
        count, due = (count + 1) % WORDS, max(due + between_s, at)


class PlayedMotor:
    """See ``MotorProcess``."""

    def __init__(self, times: Times, between_s: float):
        self.sock, theirs = socket.socketpair()
        self._process: BaseProcess = FORK.Process(target=play, args=(theirs, times, between_s))
        self._process.start()
        theirs.close()

    async def ended(self) -> int:
        await asyncio.to_thread(self._process.join)
        return 0

    def kill(self) -> None:
        self._process.kill()


def serve(sock: socket.socket, times: Times, between_s: float) -> None:
    """A server's front, over a played engine."""

    async def start() -> PlayedMotor:
        return PlayedMotor(times, between_s)

    async def running() -> None:
        supervisor = Supervisor(start, Open("plan.yaml"), lambda line: None)
        supervisor.started()
        await serve_on(sock, Served("played"), vocabulary(), Keys(()), supervisor)

    asyncio.run(running())


def cpu_s(pid: int) -> float:
    """Of all threads of a process."""
    return sum(int(Path(task, "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


class Ways:
    """Case `way`."""

    def __init__(self, given: Mapping[str, str]):
        self.counts = [int(count) for count in given.get("counts", "1,8,32").split(",")]
        self.passes, self.between_s = int(given.get("passes", "400")), float(given.get("between_ms", "25")) / 1e3
        self.path = CHAT if given.get("kind") == "chat" else COMPLETIONS

    def way(self) -> Iterator[Row]:
        times = Times()
        with socket.create_server(("127.0.0.1", 0)) as sock:
            front = FORK.Process(target=serve, args=(sock, times, self.between_s))
            front.start()
            assert front.pid is not None
            address = Address("127.0.0.1", sock.getsockname()[1])
        try:
            wait_ready(address)
            for count in self.counts:
                before = cpu_s(front.pid)
                ways = sorted(read_streams(address, self.path, count, self.passes, times))
                token_s, what = (cpu_s(front.pid) - before) / (count * self.passes), f"{count} streams, {len(ways)} tokens"
                p50, p99 = (percentile(ways, share) for share in (0.5, 0.99))
                yield Row("token to its reader, p50", what, p50 * 1e3, MOST_S * 1e3, "ms", p50 / MOST_S, "", None, 0, 0)
                yield Row("token to its reader, p99", what, p99 * 1e3, MOST_S * 1e3, "ms", p99 / MOST_S, "<= 1", None, 0, 0)
                yield Row("CPU time of the front, a token", what, token_s * 1e6, 0, "us", 0, "", None, 0, 0)
        finally:
            front.terminate()
            front.join()


def wait_ready(address: Address) -> None:
    while True:
        try:
            with socket.create_connection((address.host, address.port)) as sock:
                sock.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                if b" 200 " in sock.recv(4096):
                    return
        except OSError:
            pass
        time.sleep(0.1)


def read_streams(address: Address, path: str, count: int, tokens: int, times: Times) -> Iterator[float]:
    """Seconds of each token's way, of ``count`` streams at once."""
    body = json.dumps(body_of(path, "x", tokens, "played")).encode()
    with selectors.DefaultSelector() as ready:
        for _ in range(count):
            sock = socket.create_connection((address.host, address.port))
            sock.sendall(address.head("POST", path, body) + body)
            ready.register(sock, selectors.EVENT_READ)
        found: list[tuple[float, bytes]] = []
        while ready.get_map():
            for key, _ in ready.select():
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 16)
                if data:
                    found.append((time.monotonic(), data))
                else:
                    ready.unregister(key.fileobj)
                    key.fileobj.close()
    ways = [now - times[int(word)] for now, data in found for word in WORD.findall(data)]
    if len(ways) != count * tokens:
        raise SystemExit(f"{len(ways)} tokens came of {count * tokens}: {found[-1][1][-300:]!r}")
    yield from ways


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
    except UserError as error:
        raise SystemExit(str(error)) from None
    run_cases(
        chosen(given.get("cases", "way"), {"way": Ways(given).way}),
        {"cpus": os.cpu_count()},
        Path(given["out"]) if "out" in given else None,
    )


if __name__ == "__main__":
    main()
