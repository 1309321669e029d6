"""An endpoint in which every further row is nearly free: the table of issue 21, each case beside its limit or its prediction.

    python bench/serve.py work=/dev/shm/penstock out=serve-rows.json cases=rows vram=6GiB       # one case a command, each within 8 minutes
    python bench/serve.py work=/dev/shm/penstock out=serve-load.json cases=crowd,idle vram=12GiB
    python bench/serve.py work=bench-work cases=rows,crowd,light,ninety,closed,idle,turns model=demo layers=4 prompt=64 new=16 quick=true

`rows`: 1 to 32 rows as a fixed batch and in the server, seconds a step over max(bytes streamed / link, compute). `crowd`: 32 clients over
that fixed batch. `light`: TTFT at 30 and 60 % of the planned load, in passes. `ninety`: at 90 %, beside the simulator. `closed`: 1, 8, 32
and 64 clients, throughput beside the simulator. `idle`: the engine between steps, and a token's way to the socket. `turns`: second turns of
16 conversations of 4k tokens. `llama`: 16 clients, beside llama.cpp's server (`llama_server=PATH`, `gguf=FILE`), the best of three thread
counts.

`model`, `layers`, `vram`, `prompt`, `new`, `clients` change the work, `counts` the rows and the clients of `closed`, `shares` the loads of
`light`; `seconds` is about how long each load lasts, `pairs` how often a fixed batch runs. Cases of one plan share one server, `crowd` and
`idle` one load. The checkpoint is made once under `work`, unless `checkpoint=DIR` names one; `host=true` lets the CPU compute beside the
card, as plans may. The machine is probed once; `quick=true` leaves the CPU's products out of it. What a limit is made of is measured by the
process that runs the fixed batch (bench/worker.py). Planned load is the highest Poisson rate that the simulator sustains, and it plays the
very arrivals that the clients send. A pass's seconds are the server's own, of /metrics.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row  # noqa: E402
from bench.clients import COMPLETIONS, Figures, arriving, body_of, closed_loop, model_name, token_prompt  # noqa: E402
from bench.hybrid import ALONE, Hybrid, play  # noqa: E402
from bench.link import Bench  # noqa: E402
from bench.serve_rig import Server, grown, histogram_share  # noqa: E402
from bench.sse import Address, Reply, ask  # noqa: E402
from bench.worker import Worker  # noqa: E402
from penstock.planner.common.measures import parse_bytes  # noqa: E402
from penstock.planner.contract.plan.plan import Plan  # noqa: E402
from penstock.planner.contract.plan.planfile import read_plan  # noqa: E402
from penstock.planner.contract.serving.arrivals import Arrivals, Lengths  # noqa: E402
from penstock.planner.contract.serving.pass_prices import PassPrices  # noqa: E402
from penstock.planner.contract.serving.serve_limits import ServeLimits  # noqa: E402
from penstock.planner.contract.serving.serving_forecast import ServingForecast, planned_load, simulate_serving  # noqa: E402

KEYS = (
    "work", "out", "cases", "model", "layers", "vram", "steps", "pairs", "prompt", "new", "clients", "seconds", "quick", "form",
    "llama_server", "gguf", "ngl", "peer_threads", "host", "checkpoint", "counts", "shares",
)  # fmt: skip
CASES = ("rows", "crowd", "light", "ninety", "closed", "idle", "turns", "llama")
COUNTS, LIGHT = "1,2,4,8,16,32", "0.3,0.6"
CLOSED, QUEUE = "1,8,32,64", 256
SETTLED = 0.25
"""As in the simulator: what lies between the first and the last quarter of the answers."""
MOST_STEP, LEAST_SHARE, MOST_P50, MOST_P99, NEAR_TTFT, NEAR_RATE = "<= 1.03", ">= 0.92", "<= 2.2", "<= 4", "<= 1.25", "<= 0.1"
LLAMA_ROWS = 16
WARM_NEW = 8
CROWD = 3
"""Requests of each client."""
VITAL_S = 1.5
"""Longer than between two words of the engine on itself."""
TURNS, TURN_TOKENS, TURN_NEW, TAIL_TOKENS = 16, 4096, 32, 64


class Serving:
    """The cases over one checkpoint; ``given`` are the command's keys."""

    def __init__(self, servers: ExitStack, bench: Bench, worker: Worker, profile: Mapping[str, Any], given: Mapping[str, str]):
        self.bench, self.given = bench, given
        self._servers, self._open = servers, dict[Path, tuple[Server, str]]()
        self._fixed: dict[int, tuple[Plan, float]] = {}
        self._resident_s: dict[int, float] = {}
        self._link_gbps: float | None = None
        self.hybrid = Hybrid(bench, worker, profile, given)
        self.prompt, self.new = int(given.get("prompt", "512")), int(given.get("new", "128"))
        self.clients, self.seconds = int(given.get("clients", "32")), float(given.get("seconds", "60"))

    @cached_property
    def checkpoint(self) -> Path:
        given = self.given.get("checkpoint")
        return Path(given).expanduser().resolve() if given else self.hybrid.checkpoint(self.given.get("form", "bf16"))

    # ---- plans and servers

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
        self._open.clear()

    def resident(self, rows: int) -> float:
        """Seconds of a step of ``rows`` sequences with all weights in VRAM."""
        if rows not in self._resident_s:
            self.machine_alone()
            self._resident_s[rows] = self.hybrid.resident_s(self.checkpoint, rows, self.prompt)
        return self._resident_s[rows]

    def fixed(self, rows: int) -> tuple[Plan, float]:
        """The plan of a fixed batch of ``rows``, and its seconds a step."""
        if rows not in self._fixed:
            self.machine_alone()
            plan = self.hybrid.solve(f"rows-{rows}", self.checkpoint, *self.alone, prompt=self.prompt, batch=rows)
            self._fixed[rows] = plan, median(self.hybrid.run(plan, self.checkpoint).step_s for _ in range(self.hybrid.pairs))
        return self._fixed[rows]

    def bodies(self, name: str, count: int, new: int | None = None, seed: str = "") -> list[dict[str, Any]]:
        vocab = self.served.model.vocab
        prompts = (token_prompt(self.prompt, vocab, f"{seed} {k}") for k in range(count))
        return [body_of(COMPLETIONS, prompt, new or self.new, name) for prompt in prompts]

    def load(self, server: Server, name: str, clients: int, count: int, new: int | None = None, seed: str = "warm") -> list[Reply]:
        """A closed loop's replies. SystemExit where one failed."""
        return whole(asyncio.run(closed_loop(server.address, COMPLETIONS, self.bodies(name, count, new, seed), clients)), server)

    def link_gbps(self, plan: Plan) -> float:
        """Of the card's link, by the process that runs plans, once; 0 without a card."""
        if self._link_gbps is None:
            self._link_gbps = self.hybrid.rates(plan).link_gbps if self.hybrid.card else 0.0
        return self._link_gbps

    # ---- rows

    def row(
        self, case: str, what: str, result: float, limit: float, unit: str, target: str, predicted: float | None = None, **more: float
    ) -> Row:
        said = self.served.prediction
        ratio = more.get("ratio", result / limit if limit else 0.0)
        return Row(case, what, result, limit, unit, ratio, target, predicted, said.vram_bytes / 1e9, said.dram_bytes / 1e9)

    # ---- cases

    def rows(self) -> Iterator[Row]:
        """Seconds a step: a fixed batch by its own plan, then the server by one plan for all counts."""
        served, prices = ServeLimits.of(self.served), PassPrices(self.served)
        counts = [count for count in map(int, self.given.get("counts", COUNTS).split(",")) if count <= served.rows]
        print(f"  counts={counts}: the plan serves {served.rows} rows", file=sys.stderr, flush=True)
        most_s = self.resident(max(counts))
        for count in counts:
            plan, step_s = self.fixed(count)
            yield self._step_row("fixed batch", count, step_s, plan, most_s, plan.prediction.decode_s_per_token)
        for count in counts:
            server, name = self.server(self.path)
            behind = ceil(count * self.prompt / (served.pass_tokens - served.rows))
            new = min(behind + max(8, self.hybrid.steps), served.capacity_tokens // count - self.prompt)
            step_s = decode_gap(self.load(server, name, count, count, new, f"rows {count}"), count)
            predicted = prices.decode_s(count, self.prompt + new / 2)
            yield self._step_row("server", count, step_s, self.served, most_s, predicted)

    def _step_row(self, who: str, count: int, step_s: float, plan: Plan, most_s: float, predicted_s: float) -> Row:
        """``most_s``: compute with the most rows. Where the stream takes longer than that, it does so with fewer, too."""
        copied_gb = sum(plan.placement.unit_bytes(unit) for unit in plan.placement.step_units) / 1e9
        link = self.link_gbps(plan)
        streamed_s = copied_gb / link if link else 0.0
        resident_s = most_s if most_s <= streamed_s else self.resident(count)
        what = f"{copied_gb:.2f} GB streamed, {streamed_s * 1e3:.1f} ms; compute {resident_s * 1e3:.1f} ms"
        limit = max(streamed_s, resident_s)
        return self.row(f"{count} rows, {who}", what, step_s, limit, "s", MOST_STEP, predicted_s / step_s)

    @cached_property
    def full(self) -> tuple[list[Reply], dict[str, float], dict[str, float]]:
        """Of all clients in a closed loop: the replies, and the server's figures before and after."""
        server, name = self.server(self.path)
        before = server.metrics()
        replies = self.load(server, name, self.clients, CROWD * self.clients, seed="crowd")
        time.sleep(VITAL_S)
        return replies, before, server.metrics()

    def crowd(self) -> Iterator[Row]:
        """Tokens a second of clients that come and go, over those of as many rows that stay."""
        _, step_s = self.fixed(self.clients)
        replies, _, _ = self.full
        forecast = simulate_serving(self.served, self.arrivals(CROWD * self.clients, clients=self.clients))
        found = settled(replies)
        yield self.row(
            f"{self.clients} clients", "over the fixed batch", found, self.clients / step_s, "tok/s", LEAST_SHARE,
            forecast.tokens_per_s / found,
        )  # fmt: skip

    def arrivals(self, requests: int, per_s: float = 0.0, clients: int = 1, new: int | None = None) -> Arrivals:
        return Arrivals(Lengths(self.prompt, new or self.new), requests, per_s, clients, 1)

    def light(self) -> Iterator[Row]:
        for share in map(float, self.given.get("shares", LIGHT).split(",")):
            found, _, pass_s, what = self._poisson(share)
            for name, seconds, most in (("p50", found.ttft_s.p50, MOST_P50), ("p99", found.ttft_s.p99, MOST_P99)):
                yield self.row(f"TTFT {name} at {share:.0%}", f"in passes; {what}", seconds, pass_s, "s", most)

    def ninety(self) -> Iterator[Row]:
        found, forecast, _, what = self._poisson(0.9)
        pairs = (("p50", found.ttft_s.p50, forecast.ttft_s.p50), ("p99", found.ttft_s.p99, forecast.ttft_s.p99))
        for name, measured, predicted in pairs:
            off = max(measured / predicted, predicted / measured)
            yield self.row(f"TTFT {name} at 90%", what, measured, predicted, "s", NEAR_TTFT, predicted / measured, ratio=off)

    def _poisson(self, share: float) -> tuple[Figures, ServingForecast, float, str]:
        """Measured and simulated at so much of the planned load, and seconds of a pass."""
        rate = share * planned_load(self.served, self.arrivals(8 * self.clients))
        arrivals = self.arrivals(min(2000, max(40, round(rate * self.seconds))), rate)
        forecast = simulate_serving(self.served, arrivals)
        server, name = self.server(self.path)
        bodies, before = self.bodies(name, arrivals.requests, seed=f"poisson {share}"), server.metrics()
        replies = whole(asyncio.run(arriving(server.address, COMPLETIONS, bodies, list(arrivals.moments()))), server)
        pass_s = self._pass_s(server, before)
        return Figures.of(replies), forecast, pass_s, f"{arrivals.requests} requests, {rate:.3g} a second"

    def _pass_s(self, server: Server, before: Mapping[str, float]) -> float:
        """The mean of the passes since ``before``."""
        time.sleep(VITAL_S)
        after = server.metrics()
        return grown(before, after, "penstock_engine_busy_seconds_total") / grown(before, after, "penstock_passes_total")

    def closed(self) -> Iterator[Row]:
        server, name = self.server(self.path)
        for clients in map(int, self.given.get("counts", CLOSED).split(",")):
            each = simulate_serving(self.served, self.arrivals(4 * clients, clients=clients))
            count = max(4, 3 * clients, round(each.requests_per_s * self.seconds))
            forecast = simulate_serving(self.served, self.arrivals(count, clients=clients))
            found = settled(self.load(server, name, clients, count, seed=f"closed {clients}"))
            off = abs(forecast.tokens_per_s / found - 1)
            what, near = f"{count} requests, throughput beside the simulator's", forecast.tokens_per_s / found
            yield self.row(f"{clients} clients", what, found, forecast.tokens_per_s, "tok/s", NEAR_RATE, near, ratio=off)

    def idle(self) -> Iterator[Row]:
        _, before, after = self.full
        idle_s, busy_s = (grown(before, after, f"penstock_engine_{kind}_seconds_total") for kind in ("idle", "busy"))
        what = f"{self.clients} streams"
        yield self.row("engine idle between steps", what, idle_s, idle_s + busy_s, "s", "<= 0.01")
        way_s = histogram_share(before, after, "penstock_token_to_socket_seconds", 0.99)
        if way_s is None:
            raise SystemExit("penstock_token_to_socket_seconds: nothing was counted")
        yield self.row("token to socket, p99", what, way_s, 0.002, "s", "<= 1")

    def turns(self) -> Iterator[Row]:
        """Each second turn is alone with rows that decode meanwhile, so that its own restore is seen."""
        tokens = min(TURN_TOKENS, self.prompt * 8)
        kept = TURNS * (tokens + TURN_NEW)
        path = self.plan("turns", 4, tokens + TAIL_TOKENS, self.new, f"workload.kept_tokens={kept}")
        plan, vocab = read_plan(path), self.served.model.vocab
        firsts = [token_prompt(tokens, vocab, f"turn {k}") for k in range(TURNS)]
        link = self.link_gbps(plan) or self.served.hardware.dram_copy_gbps
        server, name = self.server(path)
        asked = [body_of(COMPLETIONS, prompt, TURN_NEW, name) for prompt in firsts]
        whole(asyncio.run(closed_loop(server.address, COMPLETIONS, asked, 2)), server)
        alone, beside, seconds = asyncio.run(self._second_turns(server.address, name, firsts))
        pass_s = median(reply.between_s for reply in alone)
        restored = median(reply.cached_tokens for reply in seconds)
        limit = restored * plan.model.kv_bytes_per_token / link / 1e9 + 1.5 * pass_s
        what = f"{restored:.0f} of {tokens + TAIL_TOKENS} tokens restored, median of {TURNS}"
        yield self.row("second turn, TTFT", what, median(r.ttft_s for r in seconds), limit, "s", "<= 1.15")
        yield self.row(
            "other rows' steps meanwhile", "over steps before", median(reply.between_s for reply in beside), pass_s, "s", "<= 1.05"
        )

    async def _second_turns(self, address: Address, name: str, firsts: Sequence[list[int]]) -> tuple[list[Reply], list[Reply], list[Reply]]:
        """Rows that decode alone, those that decode beside the second turns, and these."""
        vocab = self.served.model.vocab

        async def row(seed: str) -> Reply:
            return await ask(address, COMPLETIONS, body_of(COMPLETIONS, token_prompt(self.prompt, vocab, seed), self.new, name))

        alone = [await row(f"alone {k}") for k in range(3)]
        beside, seconds = list[Reply](), list[Reply]()
        other = asyncio.create_task(row("beside 0"))
        for k, first in enumerate(firsts):
            body = body_of(COMPLETIONS, first + token_prompt(TAIL_TOKENS, vocab, f"tail {k}"), 4, name)
            seconds.append(await ask(address, COMPLETIONS, body))
            if other.done():
                beside.append(other.result())
                other = asyncio.create_task(row(f"beside {k + 1}"))
        return alone, [*beside, await other], seconds

    def llama(self) -> Iterator[Row]:
        """Both with the same VRAM, as much of llama.cpp's model in it as fits."""
        program, gguf = self.given.get("llama_server"), self.given.get("gguf")
        if not program or not gguf:
            raise SystemExit("cases=llama: give llama_server=PATH and gguf=FILE, the same geometry in the same format")
        cores = self.hybrid.cores
        threads = self.given.get("peer_threads", f"{max(1, cores // 4)},{max(1, cores // 2)},{cores}").split(",")
        self.machine_alone()
        theirs = {count: self._llama_rate(program, gguf, count) for count in dict.fromkeys(threads)}
        best = max(theirs, key=theirs.__getitem__)
        mine = settled(self.load(*self.server(self.path), LLAMA_ROWS, 4 * LLAMA_ROWS, seed="llama"))
        what = f"{LLAMA_ROWS} clients; {best} threads, -ngl {self._llama_layers()}: " + ", ".join(
            f"{k}: {v:.3g}" for k, v in theirs.items()
        )
        yield self.row("over llama.cpp's server", what, mine, theirs[best], "tok/s", ">= 1.3")

    def _llama_layers(self) -> str:
        """Of the model, that fit into the VRAM beside KV of all rows and a GiB of scratch and context."""
        if "ngl" in self.given:
            return self.given["ngl"]
        model, kv_tokens = self.served.model, LLAMA_ROWS * (self.prompt + self.new)
        layer = model.weight_bytes / model.layers + kv_tokens * model.kv_bytes_per_token / model.layers
        return str(max(0, int(((parse_bytes(self.given.get("vram", "6GiB")) or 0) - (1 << 30)) // layer)))

    def _llama_rate(self, program: str, gguf: str, threads: str) -> float:
        room = LLAMA_ROWS * (self.prompt + self.new + 32)
        with socket_port() as port:
            command = [program, "-m", gguf, "-np", str(LLAMA_ROWS), "-cb", "-c", str(room), "-t", threads, "-ngl", self._llama_layers()]
            command += ["--port", str(port), "--host", "127.0.0.1", "--no-webui"]
        log = self.bench.work / f"llama-server-{threads}.log"
        with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
            try:
                address = Address("127.0.0.1", port)
                asyncio.run(answered(address, process, log))
                bodies = self.bodies("any", 4 * LLAMA_ROWS, seed="llama")
                asyncio.run(closed_loop(address, COMPLETIONS, bodies[:2], 2))
                replies = asyncio.run(closed_loop(address, COMPLETIONS, bodies, LLAMA_ROWS))
            finally:
                process.kill()
        failed = Figures.of(replies).errors
        if failed:
            raise SystemExit(f"{program}: {failed[0]}")
        return settled(replies)


def whole(replies: list[Reply], server: Server) -> list[Reply]:
    """``replies``, none of which failed. SystemExit otherwise."""
    figures = Figures.of(replies)
    if figures.failed:
        raise SystemExit(f"{figures.failed} of {figures.requests} requests failed: {', '.join(figures.errors)}; {server.words[-500:]}")
    return replies


def decode_gap(replies: Sequence[Reply], rows: int) -> float:
    """From one token to the next while all ``rows`` decode, none of them behind its prompt: the median over rows of each one's mean, since
    a loaded client reads several at a time."""
    since, until = max(reply.times_s[0] for reply in replies), min(reply.times_s[-1] for reply in replies)
    inside = [[t for t in reply.times_s if since <= t <= until] for reply in replies]
    found = [(times[-1] - times[0]) / (len(times) - 1) for times in inside if len(times) > 1]
    if not found:
        raise SystemExit(f"{rows} rows never decoded together: steps={len(replies[0].times_s)} is too few")
    return median(found)


def settled(replies: Sequence[Reply]) -> float:
    """Tokens a second between the first and the last quarter of the answers, as the simulator counts them."""
    ended = sorted(reply.ended_s for reply in replies)
    first, last = int(SETTLED * len(ended)), len(ended) - 1 - int(SETTLED * len(ended))
    since, until = ended[first], ended[last]
    if until <= since:
        since, until = min(reply.begun_s for reply in replies), ended[-1]
    inside = sum(reply.tokens * sum(since < t <= until for t in reply.times_s) / len(reply.times_s) for reply in replies)
    return inside / (until - since)


@contextmanager
def socket_port() -> Iterator[int]:
    """A port that was free a moment ago."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


async def answered(address: Address, process: subprocess.Popen[bytes], log: Path, within_s: int = 240) -> None:
    """Until a server that is not ours takes requests."""
    from bench.sse import fetch

    for _ in range(within_s * 5):
        if process.poll() is not None:
            raise SystemExit(f"it ended: {log.read_text(errors='replace')[-800:]}")
        try:
            if (await fetch(address, "/health"))[0] == 200:
                return
        except (OSError, EOFError):
            pass
        await asyncio.sleep(0.2)
    raise SystemExit(f"not ready after {within_s} s: {log.read_text(errors='replace')[-800:]}")


if __name__ == "__main__":
    with ExitStack() as servers:
        play(partial(Serving, servers), CASES, "rows", KEYS)
