"""An endpoint in which every further row is nearly free: the table of issue 21, each case beside its limit or its prediction.

    python bench/serve.py work=/dev/shm/penstock out=serve-rows.json cases=rows vram=6GiB       # one case a command, each within 8 minutes
    python bench/serve.py work=/dev/shm/penstock out=serve-load.json cases=crowd,idle vram=12GiB
    python bench/serve.py work=/dev/shm/penstock out=serve-ninety.json cases=ninety,closed,turns layers=16 vram=4GiB seconds=15 quick=true
    python bench/serve.py work=bench-work cases=rows,crowd,light,ninety,closed,idle,turns model=demo layers=4 prompt=64 new=16 quick=true

`rows`: 1 to 32 rows as a fixed batch and in the server, seconds a step over max(bytes streamed / link, compute). `between`: the fixed
batches that `fixed` leaves out of it. `crowd`: 32 clients over that fixed batch. `light`: TTFT at 30 and 60 % of the planned load, in
passes. `ninety`: at 90 %, beside the simulator. `closed`: 1, 8, 32 and 64 clients, throughput beside the simulator. `idle`: the engine
between steps, and a token's way to the socket. `turns`: second turns of 16 conversations of 4k tokens. `llama`: 16 clients, beside
llama.cpp's server (`llama=DIR` has its programs), the best of three thread counts. `transformers`: 16 clients, beside `transformers serve`,
with its continuous batching and without. It has all weights in memory.

`model`, `layers`, `vram`, `prompt`, `new`, `clients` change the work, `counts` the rows, `fixed` those of fixed batches, `loops` the
clients of `closed`, `shares` the loads of `light`. `seconds` is about how long each load lasts, `ninety` twice as long; what each will take
is told before. Replies of `ninety` have a quarter of the tokens, and those of `closed` as many as there is time for. `pairs` is how often a
fixed batch runs, `steps` how many steps of it and of each count of rows in the server are measured, `peer_requests` how many each client
has for a server that others wrote. Cases of one plan share one server; `crowd`, `idle` and as many clients of `closed` share one load. The
checkpoint is made once under `work`, unless `checkpoint=DIR` names one; `host=true` lets the CPU compute beside the card, as plans may. The
machine is probed once. `quick=true` leaves the CPU's products out of it. `profile=DIR` takes what was found by a command whose `work` that
was. All rows of one VRAM in one command: `serve_whole_12` of bench/waiting.yaml.

What a limit is made of is measured by the process that runs the fixed batch (bench/worker.py). Planned load is the highest Poisson rate
that the simulator sustains, and it plays the very arrivals that the clients send. A pass's seconds are the server's own, of /metrics, told
apart by whether a prompt's tokens are in it, each beside the plan's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row  # noqa: E402
from bench.link import Bench  # noqa: E402
from bench.probed import play  # noqa: E402
from bench.serve_loads import Loads  # noqa: E402
from bench.serve_peers import Peers  # noqa: E402
from bench.serve_plans import ServePlans  # noqa: E402
from bench.serve_rows import StepRows  # noqa: E402
from bench.serve_turns import Turns  # noqa: E402
from bench.worker import Worker  # noqa: E402

KEYS = (
    "work", "out", "cases", "model", "layers", "vram", "steps", "pairs", "prompt", "new", "clients", "seconds", "quick", "form",
    "llama", "peer_threads", "host", "checkpoint", "counts", "fixed", "loops", "shares", "peer_requests", "profile",
)  # fmt: skip
CASES = ("rows", "between", "crowd", "light", "ninety", "closed", "idle", "turns", "llama", "transformers")


class Serving:
    """The cases over one checkpoint; ``given`` are the command's keys."""

    def __init__(self, servers: ExitStack, bench: Bench, worker: Worker, profile: Mapping[str, Any], given: Mapping[str, str]):
        self.rig = ServePlans(servers, bench, worker, profile, given)
        self.steps, self.loads = StepRows(self.rig), Loads(self.rig)

    def rows(self) -> Iterator[Row]:
        return self.steps.rows()

    def between(self) -> Iterator[Row]:
        return self.steps.between()

    def crowd(self) -> Iterator[Row]:
        return self.loads.crowd()

    def idle(self) -> Iterator[Row]:
        return self.loads.idle()

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


if __name__ == "__main__":
    with ExitStack() as servers:
        play(partial(Serving, servers), CASES, "rows", KEYS)
