"""Plans and servers of bench/serve.py: each solved and opened once, its loads, and what a step of a fixed batch takes there."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.beside_rates import link_rate
from bench.cases import Row
from bench.clients import COMPLETIONS, Figures, body_of, closed_loop, model_name, token_prompt
from bench.hybrid import ALONE, BUSY_S, Hybrid
from bench.link import Bench
from bench.serve_rig import Server
from bench.sse import Reply
from bench.worker import Trial, Worker, measure_with_link
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan
from penstock.planner.contract.serving.settled_answers import settled_answers

QUEUE, WARM_NEW = 256, 8


@dataclass(frozen=True)
class Fixed:
    """A fixed batch: its plan, its seconds a step, and what the link of that very run gave."""

    plan: Plan
    step_s: float
    link_gbps: float


class ServePlans:
    """Over one checkpoint; ``given`` are the command's keys."""

    def __init__(self, servers: ExitStack, bench: Bench, worker: Worker, profile: Mapping[str, Any], given: Mapping[str, str]):
        self.bench, self.given = bench, given
        self._servers, self._open = servers, dict[Path, tuple[Server, str]]()
        self._solved: dict[int, Plan] = {}
        self._fixed: dict[int, Fixed] = {}
        self._resident_s: dict[int, float] = {}
        self._begun_s = time.perf_counter()
        self.hybrid = Hybrid(bench, worker, profile, given)
        self.prompt, self.new = int(given.get("prompt", "512")), int(given.get("new", "128"))
        self.clients, self.seconds = int(given.get("clients", "32")), float(given.get("seconds", "60"))

    @cached_property
    def checkpoint(self) -> Path:
        given = self.given.get("checkpoint")
        return Path(given).expanduser().resolve() if given else self.hybrid.checkpoint(self.given.get("form", "bf16"))

    def plan(self, name: str, clients: int, prompt: int, new: int, *keys: str) -> Path:
        """A server's plan, solved once for all commands over the same directory."""
        vram = self.given.get("vram", "6GiB")
        path = self.bench.work / f"serve-{name}-{clients}-{prompt}-{new}-{vram}.yaml"
        if not path.exists():
            budget = [f"hardware.vram_bytes={vram}"] if self.hybrid.card else []
            asked = {"clients": clients, "prompt_tokens": prompt, "new_tokens": new, "length_spread": 0, "queue": QUEUE}
            given = ["hardware=local", "model=hf", f"model.checkpoint={self.checkpoint}", "workload=serve", f"out={path}", *budget]
            self.bench.call("planner", "solve", *given, *(f"workload.{key}={value}" for key, value in asked.items()), *keys)
        return path

    @property
    def alone(self) -> Sequence[str]:
        """Keys that leave all computing to the card."""
        return () if self.given.get("host") == "true" else ALONE

    @cached_property
    def path(self) -> Path:
        return self.plan("rows", self.clients, self.prompt, self.new, *self.alone)

    @cached_property
    def served(self) -> Plan:
        return read_plan(self.path)

    def solve_ahead(self, counts: Sequence[int]) -> None:
        """The server's plan and those of fixed batches of ``counts``, each by a process of one thread, side by side."""
        self.checkpoint  # noqa: B018 - that all of them read
        with ThreadPoolExecutor(max(1, self.hybrid.cores // 2)) as pool:
            served = pool.submit(lambda: self.path)
            solving = {count: pool.submit(self._solve, count) for count in counts if count not in self._solved}
            served.result()
            self._solved.update({count: plan.result() for count, plan in solving.items()})

    def _solve(self, rows: int) -> Plan:
        return self.hybrid.solve(f"rows-{rows}", self.checkpoint, *self.alone, prompt=self.prompt, batch=rows)

    def server(self, path: Path) -> tuple[Server, str]:
        """It, loaded and warm, and its model's name. Open until another is asked for, or the machine alone."""
        if path not in self._open:
            self.machine_alone()
            log = self.bench.work / f"{path.stem}.log"
            server = self._servers.enter_context(Server(log, f"plan={path}", env=self.bench.env))
            print(f"  runtime serve {path.stem}: {server.load_s:.1f} s", file=sys.stderr, flush=True)
            self._open[path] = server, asyncio.run(model_name(server.address))
            self.load(*self._open[path], 2, 2, WARM_NEW)
        return self._open[path]

    def machine_alone(self) -> None:
        """No server takes memory or time of what is measured next."""
        self._servers.close()
        for server, _ in self._open.values():
            print(f"  the server's own: {json.dumps(server.report)[:300]}", file=sys.stderr, flush=True)
            print(f"  of kept pages: {json.dumps((server.report or {}).get('kv_reuse'))[:700]}", file=sys.stderr, flush=True)
        self._open.clear()

    def resident(self, rows: int) -> float:
        """Seconds of a step of ``rows`` sequences with all weights in VRAM."""
        if rows not in self._resident_s:
            self.machine_alone()
            self._resident_s[rows] = self.hybrid.resident_s(self.checkpoint, rows, self.prompt)
        return self._resident_s[rows]

    def fixed(self, rows: int) -> Fixed:
        """What a fixed batch of ``rows`` takes: the middle one of its runs, of two the slower, and the link of that run."""
        if rows not in self._fixed:
            self.machine_alone()
            plan = self._solved[rows] = self._solved.get(rows) or self._solve(rows)
            trial = Trial(plan, self.checkpoint, self.hybrid.steps, 0)
            runs = sorted((self.hybrid.worker(measure_with_link, trial) for _ in range(self.hybrid.pairs)), key=lambda run: run.step_s)
            self._fixed[rows] = Fixed(plan, runs[len(runs) // 2].step_s, runs[len(runs) // 2].link_gbps)
            print(f"  fixed batch of {rows}, behind {self.elapsed_s:.0f} s", file=sys.stderr, flush=True)
        return self._fixed[rows]

    def bodies(self, name: str, count: int, new: int | None = None, seed: str = "") -> list[dict[str, Any]]:
        vocab = self.served.model.vocab
        prompts = (token_prompt(self.prompt, vocab, f"{seed} {k}") for k in range(count))
        return [body_of(COMPLETIONS, prompt, new or self.new, name) for prompt in prompts]

    def load(self, server: Server, name: str, clients: int, count: int, new: int | None = None, seed: str = "warm") -> list[Reply]:
        """A closed loop's replies. SystemExit where one failed."""
        return whole(asyncio.run(closed_loop(server.address, COMPLETIONS, self.bodies(name, count, new, seed), clients)), server)

    @property
    def elapsed_s(self) -> float:
        """Since the probe."""
        return time.perf_counter() - self._begun_s

    def say(self, what: str, seconds: float) -> None:
        """What comes next, and how long it will take by the plan."""
        print(f"  {what}: about {seconds:.0f} s, behind {self.elapsed_s:.0f} s", file=sys.stderr, flush=True)

    @cached_property
    def link_gbps(self) -> float:
        """Of the card's link, by the process that runs plans; 0 without a card."""
        return float(self.hybrid.worker(link_rate, self.hybrid.cores, BUSY_S)) if self.hybrid.card else 0.0

    def row(
        self, case: str, what: str, result: float, limit: float, unit: str, target: str, predicted: float | None = None, **more: float
    ) -> Row:
        said = self.served.prediction
        ratio = more.get("ratio", result / limit if limit else 0.0)
        return Row(case, what, result, limit, unit, ratio, target, predicted, said.vram_bytes / 1e9, said.dram_bytes / 1e9)


def whole(replies: list[Reply], server: Server) -> list[Reply]:
    """``replies``, none of which failed. SystemExit otherwise."""
    figures = Figures.of(replies)
    if figures.failed:
        raise SystemExit(f"{figures.failed} of {figures.requests} requests failed: {', '.join(figures.errors)}; {server.words[-500:]}")
    return replies


def settled(replies: Sequence[Reply], together: int) -> float:
    """Tokens a second while all rows are taken, between the answers between which the simulator counts them. ``together``: as many
    requests as rows and clients have under way."""
    ended = sorted(reply.ended_s for reply in replies)
    first, last = settled_answers(len(ended), together)
    since, until = ended[first], ended[last]
    if until <= since:
        since, until = min(reply.begun_s for reply in replies), ended[-1]
    inside = sum(reply.tokens * sum(since < t <= until for t in reply.times_s) / len(reply.times_s) for reply in replies)
    return inside / (until - since)
