"""An endpoint in which every further row is nearly free: the table of issue 21, each case beside its limit or its prediction.

    python bench/serve.py work=/dev/shm/penstock out=serve-rows.json cases=rows vram=6GiB       # one case a command, each within 8 minutes
    python bench/serve.py work=/dev/shm/penstock out=serve-load.json cases=crowd,idle vram=12GiB
    python bench/serve.py work=/dev/shm/penstock out=serve-ninety.json cases=ninety,closed,turns layers=16 vram=4GiB seconds=15 quick=true
    python bench/serve.py work=bench-work cases=rows,crowd,light,ninety,closed,idle,turns model=demo layers=4 prompt=64 new=16 quick=true

`rows`: 1 to 32 rows as a fixed batch and in the server, seconds a step over max(bytes streamed / link, compute). `crowd`: 32 clients over
that fixed batch. `light`: TTFT at 30 and 60 % of the planned load, in passes. `ninety`: at 90 %, beside the simulator. `closed`: 1, 8, 32
and 64 clients, throughput beside the simulator. `idle`: the engine between steps, and a token's way to the socket. `turns`: second turns of
16 conversations of 4k tokens. `llama`: 16 clients, beside llama.cpp's server (`llama=DIR` has its programs), the best of three thread
counts. `transformers`: 16 clients, beside `transformers serve`, with its continuous batching and without. It has all weights in memory.

`model`, `layers`, `vram`, `prompt`, `new`, `clients` change the work, `counts` the rows and the clients of `closed`, `shares` the loads of
`light`. `seconds` is about how long each load lasts, `ninety` twice as long; what each will take is told before. Replies of `ninety` have a
quarter of the tokens, and those of `closed` as many as there is time for. `pairs` is how often a fixed batch runs, `peer_requests` how many
each client has for a server that others wrote. Cases of one plan share one server, `crowd` and `idle` one load. The checkpoint is made once
under `work`, unless `checkpoint=DIR` names one; `host=true` lets the CPU compute beside the card, as plans may. The machine is probed once;
`quick=true` leaves the CPU's products out of it. What a limit is made of is measured by the process that runs the fixed batch
(bench/worker.py). Planned load is the highest Poisson rate that the simulator sustains, and it plays the very arrivals that the clients
send. A pass's seconds are the server's own, of /metrics, told apart by whether a prompt's tokens are in it, each beside the plan's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row  # noqa: E402
from bench.hybrid import play  # noqa: E402
from bench.link import Bench  # noqa: E402
from bench.serve_loads import VITAL_S, Loads  # noqa: E402
from bench.serve_peers import Peers  # noqa: E402
from bench.serve_plans import ServePlans, settled  # noqa: E402
from bench.serve_rig import grown, histogram_share  # noqa: E402
from bench.serve_turns import Turns  # noqa: E402
from bench.sse import Reply  # noqa: E402
from bench.worker import Worker  # noqa: E402
from penstock.planner.contract.plan.plan import Plan  # noqa: E402
from penstock.planner.contract.serving.pass_prices import PassPrices  # noqa: E402
from penstock.planner.contract.serving.serve_limits import ServeLimits  # noqa: E402
from penstock.planner.contract.serving.serving_forecast import simulate_serving  # noqa: E402

KEYS = (
    "work", "out", "cases", "model", "layers", "vram", "steps", "pairs", "prompt", "new", "clients", "seconds", "quick", "form",
    "llama", "peer_threads", "host", "checkpoint", "counts", "shares", "peer_requests",
)  # fmt: skip
CASES = ("rows", "crowd", "light", "ninety", "closed", "idle", "turns", "llama", "transformers")
COUNTS = "1,2,4,8,16,32"
MOST_STEP, LEAST_SHARE = "<= 1.03", ">= 0.92"
CROWD = 3
"""Requests of each client."""


class Serving:
    """The cases over one checkpoint; ``given`` are the command's keys."""

    def __init__(self, servers: ExitStack, bench: Bench, worker: Worker, profile: Mapping[str, Any], given: Mapping[str, str]):
        self.rig = ServePlans(servers, bench, worker, profile, given)
        self.loads = Loads(self.rig)

    def light(self) -> Iterator[Row]:
        return self.loads.light()

    def ninety(self) -> Iterator[Row]:
        return self.loads.ninety()

    def closed(self) -> Iterator[Row]:
        return self.loads.closed()

    def turns(self) -> Iterator[Row]:
        return Turns(self.rig).turns()

    def llama(self) -> Iterator[Row]:
        return Peers(self.rig).llama()

    def transformers(self) -> Iterator[Row]:
        return Peers(self.rig).transformers()

    def rows(self) -> Iterator[Row]:
        """Seconds a step: a fixed batch by its own plan, then the server by one plan for all counts."""
        served, prices = ServeLimits.of(self.rig.served), PassPrices(self.rig.served)
        counts = [count for count in map(int, self.rig.given.get("counts", COUNTS).split(",")) if count <= served.rows]
        print(f"  counts={counts}: the plan serves {served.rows} rows", file=sys.stderr, flush=True)
        most_s = self.rig.resident(max(counts))
        for count in counts:
            plan, step_s = self.rig.fixed(count)
            yield self._step_row("fixed batch", count, step_s, plan, most_s, plan.prediction.decode_s_per_token)
        for count in counts:
            server, name = self.rig.server(self.rig.path)
            behind = ceil(count * self.rig.prompt / (served.pass_tokens - served.rows))
            new = min(behind + max(8, self.rig.hybrid.steps), served.capacity_tokens // count - self.rig.prompt)
            step_s = decode_gap(self.rig.load(server, name, count, count, new, f"rows {count}"), count)
            predicted = prices.decode_s(count, self.rig.prompt + new / 2)
            yield self._step_row("server", count, step_s, self.rig.served, most_s, predicted)

    def _step_row(self, who: str, count: int, step_s: float, plan: Plan, most_s: float, predicted_s: float) -> Row:
        """``most_s``: compute with the most rows. Where the stream takes longer than that, it does so with fewer, too."""
        copied_gb = sum(plan.placement.unit_bytes(unit) for unit in plan.placement.step_units) / 1e9
        link = self.rig.link_gbps(plan)
        streamed_s = copied_gb / link if link else 0.0
        resident_s = most_s if most_s <= streamed_s else self.rig.resident(count)
        what = f"{copied_gb:.2f} GB streamed, {streamed_s * 1e3:.1f} ms; compute {resident_s * 1e3:.1f} ms"
        limit = max(streamed_s, resident_s)
        return self.rig.row(f"{count} rows, {who}", what, step_s, limit, "s", MOST_STEP, predicted_s / step_s)

    @cached_property
    def full(self) -> tuple[list[Reply], dict[str, float], dict[str, float]]:
        """Of all clients in a closed loop: the replies, and the server's figures before and after."""
        server, name = self.rig.server(self.rig.path)
        before = server.metrics()
        replies = self.rig.load(server, name, self.rig.clients, CROWD * self.rig.clients, seed="crowd")
        time.sleep(VITAL_S)
        return replies, before, server.metrics()

    def crowd(self) -> Iterator[Row]:
        """Tokens a second of clients that come and go, over those of as many rows that stay."""
        _, step_s = self.rig.fixed(self.rig.clients)
        replies, _, _ = self.full
        forecast = simulate_serving(self.rig.served, self.loads.arrivals(CROWD * self.rig.clients, clients=self.rig.clients))
        found = settled(replies, min(ServeLimits.of(self.rig.served).rows, self.rig.clients))
        yield self.rig.row(
            f"{self.rig.clients} clients", "over the fixed batch", found, self.rig.clients / step_s, "tok/s", LEAST_SHARE,
            forecast.tokens_per_s / found,
        )  # fmt: skip

    def idle(self) -> Iterator[Row]:
        _, before, after = self.full
        idle_s, busy_s = (grown(before, after, f"penstock_engine_{kind}_seconds_total") for kind in ("idle", "busy"))
        what = f"{self.rig.clients} streams"
        yield self.rig.row("engine idle between steps", what, idle_s, idle_s + busy_s, "s", "<= 0.01")
        way_s = histogram_share(before, after, "penstock_token_to_socket_seconds", 0.99)
        if way_s is None:
            raise SystemExit("penstock_token_to_socket_seconds: nothing was counted")
        yield self.rig.row("token to socket, p99", what, way_s, 0.002, "s", "<= 1")


def decode_gap(replies: Sequence[Reply], rows: int) -> float:
    """From one token to the next while all ``rows`` decode, none of them behind its prompt: the median over rows of each one's mean, since
    a loaded client reads several at a time."""
    since, until = max(reply.times_s[0] for reply in replies), min(reply.times_s[-1] for reply in replies)
    inside = [[t for t in reply.times_s if since <= t <= until] for reply in replies]
    found = [(times[-1] - times[0]) / (len(times) - 1) for times in inside if len(times) > 1]
    if not found:
        raise SystemExit(f"{rows} rows never decoded together: steps={len(replies[0].times_s)} is too few")
    return median(found)


if __name__ == "__main__":
    with ExitStack() as servers:
        play(partial(Serving, servers), CASES, "rows", KEYS)
