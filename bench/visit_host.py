"""What a layer's visit to its routed experts costs the thread that launches kernels, beside a card that does nothing.

    python bench/visit_host.py [work=DIR] [tokens=60] [threads=8] [readers=python]

gpt-oss-120b's geometry with tensors of about a 64th: 12 layers of 128 experts, 4 a token, slots for 300 in VRAM. A real file is read with
O_DIRECT. Routers are drawn: some experts are likelier than others. Between two visits come `OPERATIONS` small tensor operations, each of
which lets other threads have the interpreter, as launches do. Cases: all experts in VRAM, all in DRAM, half of them on the SSD, and
nothing moved while somebody reads all the time.

For each case: experts missed in VRAM and read from the SSD a visit; processor time of the thread a visit, and of what it leaves behind the
next launch, microseconds; wall time of both, and of the operations between. `readers=python` reads as where nothing is compiled.
The last line of stdout is one JSON document.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bench.gpt_oss_synth import gpt_oss_config, write_gpt_oss  # noqa: E402
from bench.keys import given_of  # noqa: E402
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint  # noqa: E402
from penstock.planner.contract.decided.decisions import ExpertSlots  # noqa: E402
from penstock.planner.contract.experts.expert_cache import Routing  # noqa: E402
from penstock.runtime.experts.card_experts import CardExperts  # noqa: E402
from penstock.runtime.experts.expert_forward import ExpertsInTurn  # noqa: E402
from penstock.runtime.experts.expert_room import ExpertHost, ExpertRoom  # noqa: E402
from penstock.runtime.memory.arena import Arena  # noqa: E402
from penstock.runtime.memory.device import Event  # noqa: E402
from penstock.runtime.memory.pieces import Segment  # noqa: E402
from penstock.runtime.model.skeleton import Skeleton, open_skeleton  # noqa: E402
from penstock.runtime.moving.ledger import Ledger  # noqa: E402
from penstock.runtime.reading.reader import ReadPool  # noqa: E402

LAYERS, HIDDEN, VRAM = 12, 352, 300
BLOCK_BYTES = 256 << 10
OPERATIONS = 60
WARM = 10
"""Tokens before any is counted."""


class IdleCard:
    """Whatever is asked of it has happened."""

    def twin(self) -> IdleCard:
        return self

    def copy_parts(self, into: torch.Tensor, source: torch.Tensor, segments: Iterable[Segment]) -> None: ...

    def copy_event(self) -> float:
        return 0.0

    def compute_event(self) -> float:
        return 0.0

    def copy_waits(self, event: float) -> None: ...

    def compute_waits(self, event: float) -> None: ...

    def host_waits(self, event: float) -> None: ...

    def done(self, event: float) -> bool:
        return True

    def time_of(self, event: float) -> float:
        return event


class NoClock:
    def pause(self) -> None: ...

    def resume(self, arrival: Event | None = None) -> None: ...


class Between:
    """What a layer computes beside its experts."""

    def __init__(self) -> None:
        self._row = torch.ones(64)

    def __call__(self) -> None:
        for _ in range(OPERATIONS):
            self._row.mul_(1.0)


def routings(count: int, top_k: int, tokens: int) -> Iterator[list[Routing]]:
    """Of each token, one a layer."""
    draw = np.random.default_rng(5)
    likely = [draw.permutation(np.exp(draw.normal(0, 0.8, count))) for _ in range(LAYERS)]
    for _ in range(tokens):
        chosen = [draw.choice(count, top_k, replace=False, p=weight / weight.sum()) for weight in likely]
        yield [Routing(one[None], prompt=False) for one in chosen]


@contextmanager
def opened(skeleton: Skeleton, checkpoint: Path, vram: int, dram: int, threads: int, how: dict[str, Any]) -> Iterator[tuple]:
    """The card's tier, its experts, and the readers."""
    experts = spec_from_checkpoint(checkpoint).experts
    room = ExpertRoom.of(experts, ExpertSlots(vram, dram), True, skeleton.store, skeleton.layers)
    arena = Arena(max(1, room.dram_bytes))
    arena.occupy(None)
    with closing(arena), ReadPool(threads, BLOCK_BYTES, **how) as pool:
        host = ExpertHost(room, arena, 0, pool)
        slots, nbytes = room.vram_share
        shared = torch.zeros(nbytes, dtype=torch.uint8)
        device: Any = IdleCard()
        card = CardExperts(room.on_card, [shared] * slots, host.vram_cache, host.dram, device, NoClock(), Ledger(), 32 << 20, 2)
        for arrival, _ in host.dram.preload(pool) if dram else ():
            arrival.wait()
        if dram:
            card.start()
        else:
            card.keep_first()
        gc.collect()
        gc.freeze()  # as a server does
        with closing(host.dram):
            yield card, room, pool


def measured(card: CardExperts, room: ExpertRoom, tokens: int) -> dict[str, float]:
    """Of ``tokens`` tokens behind those that are not counted."""
    experts, _ = room.decided
    between, nothing = Between(), torch.zeros(1)
    rows: list[tuple[float, ...]] = []
    cpu, wall = time.thread_time, time.perf_counter
    dram, before = card._dram.stats, (0, 0)
    for number, token in enumerate(routings(experts.count, experts.top_k, WARM + tokens)):
        if number == WARM:
            rows.clear()
            before = card.stats.misses, dram.misses
        for layer, routing in zip(experts.layers, token, strict=True):
            cpu_0, wall_0 = cpu(), wall()
            for _ in card.groups(layer, routing):
                pass
            cpu_1, wall_1 = cpu(), wall()
            card.route(nothing, nothing)
            cpu_2, wall_2 = cpu(), wall()
            between()
            rows.append((cpu_1 - cpu_0, wall_1 - wall_0, cpu_2 - cpu_1, wall_2 - wall_1, wall() - wall_2))
    found = {}
    for name, column in zip(("visit", "visit_wall", "behind", "behind_wall", "between_wall"), zip(*rows, strict=True), strict=True):
        found |= {name: mean(column) * 1e6, f"{name}_median": median(column) * 1e6}
    return found | {"missed": (card.stats.misses - before[0]) / len(rows), "read": (dram.misses - before[1]) / len(rows)}


@contextmanager
def reading(pool: ReadPool, room: ExpertRoom) -> Iterator[None]:
    """Inside, all of ``pool``'s threads have something to read."""
    layouts, over, places = [*room.layouts.values()], threading.Event(), threading.Semaphore(0)
    buffers = [memoryview(torch.zeros(layouts[0].nbytes + 4096, dtype=torch.uint8).numpy()) for _ in range(16)]

    def go_on(number: int, error: BaseException | None) -> None:
        if over.is_set() or error is not None:
            places.release()
            return
        layout = layouts[number % len(layouts)]
        pool.read(layout.extents, buffers[number % 16], lambda error: go_on(number + 16, error))

    for number in range(16):
        go_on(number, None)
    try:
        yield
    finally:
        over.set()
        for _ in range(16):
            places.acquire()


def of_case(name: str, skeleton: Skeleton, checkpoint: Path, tokens: int, threads: int, how: dict[str, Any]) -> dict[str, float]:
    experts = spec_from_checkpoint(checkpoint).experts
    assert experts is not None
    units = experts.units
    slots = {"vram": (units, 0), "dram": (VRAM, units), "ssd": (VRAM, units // 2), "busy": (units, 0)}[name]
    with opened(skeleton, checkpoint, *slots, threads, how) as (card, room, pool):
        if name != "busy":
            return measured(card, room, tokens)
        with reading(pool, room):
            return measured(card, room, tokens)


def main(arguments: Sequence[str]) -> None:
    given = given_of(arguments, ("work", "tokens", "threads", "readers"))
    work = Path(given.get("work", "bench-work")).resolve()
    checkpoint = work / f"visit-host-{LAYERS}-{HIDDEN}"
    if not checkpoint.exists():
        write_gpt_oss(gpt_oss_config({"layers": str(LAYERS), "hidden": str(HIDDEN), "vocab": "1024"}), checkpoint)
        os.sync()
    how: dict[str, Any] = {}
    if given.get("readers") == "python":
        how["preadv"] = lambda *read: os.preadv(*read)
    skeleton = open_skeleton(checkpoint, [ExpertsInTurn()])
    table = {}
    for name in ("vram", "dram", "ssd", "busy"):
        found = of_case(name, skeleton, checkpoint, int(given.get("tokens", "60")), int(given.get("threads", "8")), how)
        table[name] = {key: round(value, 2) for key, value in found.items()}
        print(f"{name:5}", " ".join(f"{key} {value:.1f}" for key, value in found.items()), flush=True)
    print(json.dumps({"load": os.getloadavg()[0], "cases": table}))


if __name__ == "__main__":
    main(sys.argv[1:])
