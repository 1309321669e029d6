"""Processes of a server that are killed, or stand still, under load; replies end in words or are right, then and afterwards."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from bench.cases import Row
from bench.clients import COMPLETIONS
from bench.fault_rig import FaultRig, faults_of, kept_in
from bench.known import Known
from bench.serve_rig import Server, children_of
from bench.sse import ask

CLIENTS = 8
GONE_S = 5.0
"""Within which an engine ends whose front has gone."""
HANG_S, DRAIN_S = 5.0, 2.0


class Kills:
    """Cases `engine`, `hang`, `front` and `drain`."""

    def __init__(self, rig: FaultRig):
        self.rig = rig

    def engine(self) -> Iterator[Row]:
        yield self._ended("the engine is killed", "engine", signal.SIGKILL, int(self.rig.given.get("engine", "200")))

    def hang(self) -> Iterator[Row]:
        yield self._ended("the engine stands still", "hang", signal.SIGSTOP, int(self.rig.given.get("hang", "10")), f"hang_s={HANG_S:g}")

    def _ended(self, case: str, name: str, by: signal.Signals, times: int, *keys: str) -> Row:
        pages, wrong, counts = self.rig.bench.work / f"pages-{name}", list[str](), {"answered": 0, "error": 0}
        shutil.rmtree(pages, ignore_errors=True)
        restored = 0
        with self.rig.server(name, *kept_in(pages), *keys, warm=True) as server:
            model, known = self.rig.known(server)
            for _ in range(times):
                wrong += asyncio.run(self._under_load(server, model, known, counts, by))
                server.wait_ready(120)
                afterwards = self.rig.alone(server, model, known[:4])
                wrong += faults_of(known[:4], afterwards)
                restored += afterwards[0].cached_tokens > 0
        what = f"{by.name} under load, kv.dir: {restored} restored; {counts['answered']} answered, {counts['error']} ended in an error"
        return self.rig.row(case, what, wrong, times)

    async def _under_load(self, server: Server, name: str, known: Sequence[Known], counts: dict[str, int], by: signal.Signals) -> list[str]:
        """Clients ask; in the middle the engine gets the signal ``by``. Each reply is right or ends in words -> what is wrong."""
        wrong, over = [], asyncio.Event()

        async def client(k: int) -> None:
            draw = Random(f"client {k} {self.rig.draw.random()}")
            while not over.is_set():
                one = draw.choice(known)
                reply = await ask(server.address, COMPLETIONS, one.body(name, stream=draw.random() < 0.7))
                counts["answered" if reply.answered else "error"] += 1
                if said := one.wrong(reply):
                    wrong.append(said)
                if not reply.answered:
                    return

        clients = [asyncio.create_task(client(k)) for k in range(CLIENTS)]
        await asyncio.sleep(0.1 + self.rig.draw.random())
        (engine,) = children_of(server.children()[0])
        os.kill(engine, by)
        await asyncio.sleep(0.05)
        over.set()
        await asyncio.wait_for(asyncio.gather(*clients), 120)
        return wrong

    def front(self) -> Iterator[Row]:
        times, wrong, lingered = int(self.rig.given.get("front", "50")), list[str](), list[str]()
        pages = self.rig.bench.work / "pages-front"
        shutil.rmtree(pages, ignore_errors=True)
        name, known, restored = "", list[Known](), 0
        for _ in range(times):
            with self.rig.server("front", *kept_in(pages)) as server:
                if not known:
                    name, known = self.rig.known(server)
                afterwards = self.rig.alone(server, name, known[:4])
                wrong += faults_of(known[:4], afterwards)
                restored += afterwards[0].cached_tokens > 0
                engines = server.children()
                asyncio.run(self._killed_front(server, name, known))
                lingered += [f"engine {pid} lives on" for pid in still_there(engines, GONE_S)]
        with self.rig.server("front", *kept_in(pages)) as server:
            wrong += self.rig.judged(server, name, known)
        yield self.rig.row("the front is killed", f"right afterwards, kv.dir: {restored} restored", wrong, times)
        yield self.rig.row("the front is killed", f"the engine ends within {GONE_S:g} s", lingered, times)

    def drain(self) -> Iterator[Row]:
        """Clients ask on while the server drains. What it took is answered or ends in words; it ends by itself, with status 0."""
        times, wrong, ended = int(self.rig.given.get("drain", "5")), list[str](), Counter[str]()
        for _ in range(times):
            with self.rig.server("drain", f"drain_s={DRAIN_S:g}", warm=True) as server:
                name, known = self.rig.known(server, CLIENTS)
                asyncio.run(self._drained(server, name, known, wrong, ended))
                if status := server.stop():
                    wrong.append(f"its status is {status}")
        said = ", ".join(f"{count} {what}" for what, count in ended.most_common())
        yield self.rig.row("SIGTERM under load", f"{times} times, drain_s={DRAIN_S:g}; {said}", wrong, sum(ended.values()))

    async def _drained(self, server: Server, name: str, known: Sequence[Known], wrong: list[str], ended: Counter[str]) -> None:
        async def client(one: Known) -> None:
            while True:
                stream = self.rig.draw.random() < 0.7
                reply = await ask(server.address, COMPLETIONS, one.body(name, stream=stream, max_tokens=one.tokens if stream else 64))
                what = "answered" if reply.answered else "not taken" if not reply.status else f"ended with {reply.status}"
                ended[what] += 1
                if reply.status and (said := None if reply.answered and not stream else one.wrong(reply)):
                    wrong.append(said)
                if not reply.answered:
                    return

        clients = [asyncio.create_task(client(one)) for one in known]
        await asyncio.sleep(0.5 + self.rig.draw.random())
        os.kill(server.pid, signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*clients), 120)

    async def _killed_front(self, server: Server, name: str, known: Sequence[Known]) -> None:
        asking = [asyncio.create_task(ask(server.address, COMPLETIONS, one.body(name, stream=True))) for one in known[:CLIENTS]]
        await asyncio.sleep(0.02 + 0.3 * self.rig.draw.random())
        server.kill()
        await asyncio.gather(*asking)


def still_there(pids: Sequence[int], within_s: float) -> list[int]:
    """Those that have not ended within so many seconds."""
    end = time.monotonic() + within_s
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
