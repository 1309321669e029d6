"""The servers of bench/serve_faults.py: their plan, replies that are known of them, and what is left of those who asked."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from random import Random

from bench.cases import Row
from bench.clients import COMPLETIONS, model_name
from bench.known import Known, known_replies, words
from bench.link import Bench
from bench.serve_rig import Server
from bench.sse import Reply, ask

WARM = Path(__file__).with_name("warm_motors.py")
ANY_GBPS = 100
HEAD = "\n".join(words(f"head {k}", 16) for k in range(12)) + "\n"
"""Long enough for pages to be kept of it."""
RAISES = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ m.content }}{% endfor %}"


class FaultRig:
    """Servers over one plan and one checkpoint; ``given`` are the command's keys."""

    def __init__(self, bench: Bench, given: Mapping[str, str]):
        self.bench, self.given = bench, given
        self.draw = Random(given.get("seed", "0"))

    @cached_property
    def checkpoint(self) -> Path:
        """A copy with a template that raises where a system speaks."""
        path = self.bench.work / "served"
        if not path.exists():
            shutil.copytree(Path(self.given["checkpoint"]).expanduser(), path, copy_function=shutil.copy)
            (path / "chat_template.jinja").write_text(RAISES)
        return path

    @cached_property
    def plan(self) -> Path:
        path = self.bench.work / "faults.yaml"
        if not path.exists():
            asked = {"clients": 16, "prompt_tokens": 256, "new_tokens": 64, "queue": 256, "kept_tokens": 8192}
            keys = ["hardware=local", "model=hf", f"model.checkpoint={self.checkpoint}", "workload=serve", f"out={path}"]
            self.bench.call("planner", "solve", *keys, *(f"workload.{key}={value}" for key, value in asked.items()))
        return path

    @contextmanager
    def server(self, name: str, *keys: str, env: Mapping[str, str] | None = None, warm: bool = False) -> Iterator[Server]:
        """``warm``: its engines are forked, each a child of the front's child."""
        log, asked = self.bench.work / f"{name}.log", (f"plan={self.plan}", *keys)
        command = (sys.executable, str(WARM), "serve", "port=0", *asked) if warm else ()
        with Server(log, *asked, env={**self.bench.env, **(env or {})}, command=command) as server:
            yield server

    def known(self, server: Server, count: int = 12) -> tuple[str, list[Known]]:
        name = asyncio.run(model_name(server.address))
        return name, asyncio.run(known_replies(server.address, name, count, int(self.given.get("new", "12")), HEAD))

    def alone(self, server: Server, name: str, known: Sequence[Known]) -> list[Reply]:
        """What is replied to each, one after the other."""

        async def all_of_them() -> list[Reply]:
            return [await ask(server.address, COMPLETIONS, one.body(name)) for one in known]

        return asyncio.run(all_of_them())

    def judged(self, server: Server, name: str, known: Sequence[Known]) -> list[str]:
        """What is wrong when each is asked once more, one after the other: now all must be answered."""
        return faults_of(known, self.alone(server, name, known))

    def row(self, case: str, what: str, wrong: Sequence[str], tries: int) -> Row:
        for one in wrong[:8]:
            print(f"  {case}: {one[:300]}", file=sys.stderr, flush=True)
        return Row(case, what, len(wrong), tries, "", len(wrong), "= 0", None, 0, 0)

    def asked(self, server: Server, bodies: Sequence[Mapping[str, object]], path: str = COMPLETIONS) -> list[Reply]:
        async def together() -> list[Reply]:
            return list(await asyncio.gather(*(ask(server.address, path, body) for body in bodies)))

        return asyncio.run(together())


def faults_of(known: Sequence[Known], replies: Sequence[Reply]) -> list[str]:
    """What is wrong with replies that must all be answers."""
    pairs = zip(known, replies, strict=True)
    found = (one.wrong(reply) or (None if reply.answered else f"not answered: {reply.status} {reply.error}") for one, reply in pairs)
    return [wrong for wrong in found if wrong]


def kept_in(pages: Path) -> tuple[str, str]:
    """Keys of a server that restores from ``pages`` whatever its drive's pace."""
    return f"kv.dir={pages}", f"kv.read_gbps={ANY_GBPS}"


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def left_under_way(server: Server, within_s: float = 20.0) -> list[str]:
    """What is still under way, once nobody asks."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        front = server_figures(await asyncio.to_thread(server.machine))
        if not any(front.values()):
            return []
        await asyncio.sleep(0.2)
    return [f"still under way after {within_s:g} s: {front}"]


def server_figures(machine: Mapping[str, object]) -> dict[str, float]:
    front, vital = machine["front"], machine["vital"]
    assert isinstance(front, dict)
    rows = {name: vital.get(name, 0) for name in ("rows", "waiting")} if isinstance(vital, dict) else {}
    return {"requests": front["requests"], **rows}
