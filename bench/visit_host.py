"""What a layer's visit to its routed experts costs the thread that launches kernels, beside a card that does nothing.

    python bench/visit_host.py [work=DIR] [tokens=60] [warm=200] [threads=8] [cold=4MiB]
        [cases=vram,dram,split,ssd,first,ssd_python,busy,busy_python]
    python bench/visit_host.py work=DIR layers=3 hidden=2880 block=1MiB tokens=40 warm=5 cases=vram,first

gpt-oss-120b's geometry with tensors of about a 64th: 12 layers of 128 experts, 4 a token, slots for a fifth of them in VRAM. With `hidden`
they have their whole size, 1.7 GB a layer, of which `ssd` and `first` keep half in DRAM and `dram` all: what is read then drives the
interpreter out of the caches, and visits take twice as long. A real file is read with O_DIRECT. Routers are drawn: some experts are
likelier than others. Experts are launched as where a step is recorded: their places are written to a table, and a call of the kernel's
stands for the launch, as for each of the driver's. `OPERATIONS` small tensor operations come between two visits; each of them lets other
threads have the interpreter, as launches do. Between two visits `cold` bytes are read, as a host reads others between two layers: visits
take two to three times as long then.

Cases: `vram`, all experts in VRAM; `dram`, all in DRAM; `split`, the same, of which the CPU takes one of two or three that are missed, and
two of four, by as many threads as a run may have, which spin on for 5 ms; `ssd`, half of them on the SSD; `first`, the same while all that
is read comes for the first time, as most does in a run of some dozen tokens: scales are looked at. They take turns, token by token. Then
`busy`, all in VRAM while somebody reads all the time. `ssd_python` and `busy_python` are the same by the interpreter's own threads, block
by block.

For each case: experts missed in VRAM and read from the SSD a visit; processor time of the thread a visit, as a run reports it, and of
what it leaves behind the next launch, microseconds; wall time of both, and of the operations between; means and medians of `tokens` behind
`warm` that are not counted. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bench.gpt_oss_synth import gpt_oss_config, write_gpt_oss  # noqa: E402
from bench.keys import given_of  # noqa: E402
from penstock.planner.common.measures import align_up, parse_bytes  # noqa: E402
from penstock.planner.common.threads import most_threads  # noqa: E402
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint  # noqa: E402
from penstock.planner.contract.decided.decisions import ExpertSlots  # noqa: E402
from penstock.planner.contract.experts.host_split import HostSplit  # noqa: E402
from penstock.runtime.beside.host_ffn import HostFfn  # noqa: E402
from penstock.runtime.beside.host_pool import HostPool  # noqa: E402
from penstock.runtime.experts.card_experts import CardExperts  # noqa: E402
from penstock.runtime.experts.expert_forward import ExpertsInTurn, LayerExperts, layer_experts  # noqa: E402
from penstock.runtime.experts.expert_room import ExpertHost, ExpertRoom  # noqa: E402
from penstock.runtime.experts.products.beside_card import BesideCard, ExpertUnits, Made  # noqa: E402
from penstock.runtime.experts.products.expert_products import Parameters  # noqa: E402
from penstock.runtime.experts.products.expert_table import ExpertTable  # noqa: E402
from penstock.runtime.experts.products.expert_views import SlotViews  # noqa: E402
from penstock.runtime.memory.arena import Arena  # noqa: E402
from penstock.runtime.memory.bare_copies import DriverCalls  # noqa: E402
from penstock.runtime.memory.device import Event  # noqa: E402
from penstock.runtime.memory.pieces import Segment  # noqa: E402
from penstock.runtime.model.skeleton import Skeleton, open_skeleton  # noqa: E402
from penstock.runtime.moving.arriving_scales import ArrivingScales, UrgentSoundReads  # noqa: E402
from penstock.runtime.moving.ledger import Ledger  # noqa: E402
from penstock.runtime.reading.layout import Extent  # noqa: E402
from penstock.runtime.reading.native.native_order import Brought, Come, Order  # noqa: E402
from penstock.runtime.reading.reader import ReadPool  # noqa: E402
from penstock.runtime.store.expert_modules import layers_with_experts  # noqa: E402

VRAM_SHARE = 0.195
BUSY = "busy", "busy_python"
OPERATIONS = 60
TOGETHER = 32
SPLIT = HostSplit(1.0, (1.1,), 0.0)
"""Both sides are about as quick."""


Tiers = tuple[CardExperts, ExpertRoom, ReadPool, "Launches"]


class Reads(NamedTuple):
    """In flight, and bytes of one."""

    threads: int
    block_bytes: int


class IdleCard:
    """Whatever is asked of it has happened. A call of the kernel's that does nothing stands for each of the driver's."""

    def __init__(self) -> None:
        self._copy = ctypes.PyDLL(None).sched_yield
        self._copy.argtypes = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._word = ctypes.c_uint32(0)

    def twin(self) -> IdleCard:
        return self

    def copy_parts(self, into: torch.Tensor, source: torch.Tensor, segments: Iterable[Segment]) -> None:
        to, begin = into.data_ptr(), source.data_ptr()
        for s in segments:
            self._copy(to + s.dst, begin + s.src, s.nbytes, None)

    def driver_calls(self) -> DriverCalls:
        idle = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
        return DriverCalls(idle, 0, idle, idle, 0, idle, 0, idle, idle, ctypes.addressof(self._word))

    def in_one_piece(self, begin: int, nbytes: int) -> bool:
        return True

    def event_ahead(self) -> tuple[float, int]:
        return 0.0, 0

    def copy_event(self) -> float:
        self._copy(0, 0, 0, None)
        return 0.0

    def compute_event(self) -> float:
        self._copy(0, 0, 0, None)
        return 0.0

    def idle_point(self) -> float:
        return 0.0

    def copy_waits(self, event: float) -> None: ...

    def compute_waits(self, event: float) -> None: ...

    def compute_waits_for(self, flag: torch.Tensor, value: int) -> None:
        self._copy(0, 0, 0, None)

    def compute_writes(self, flag: torch.Tensor, value: int) -> None:
        self._copy(0, 0, 0, None)

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def host_waits(self, event: float) -> None: ...

    def done(self, event: float) -> bool:
        return True

    def note_done(self, events: Iterable[float]) -> None: ...

    def time_of(self, event: float) -> float:
        return event


class NoClock:
    def pause(self) -> None: ...

    def idle(self) -> None: ...

    def resume(self, arrival: Event | None = None) -> None: ...


class Launches:
    """What a layer computes, and what drives the interpreter out of the caches."""

    def __init__(self, layers: Sequence[LayerExperts], hidden: int, top_k: int, cold_bytes: int) -> None:
        self.layers = layers
        self.hidden, self._weights = torch.zeros(1, hidden, dtype=torch.bfloat16), torch.zeros(1, top_k)
        self._row = torch.ones(64)
        self._others = np.ones(max(8, cold_bytes) // 8)
        self._table: ExpertTable | None = None
        self._launch = ctypes.PyDLL(None).sched_yield

    def visit(self, layer: LayerExperts, chosen: torch.Tensor) -> None:
        layer(self.hidden, chosen, self._weights, self._launched)

    def _launched(self, experts: Sequence[Parameters | Made], come: Callable[[], object]) -> torch.Tensor | None:
        """As :class:`penstock.runtime.recorded.piece_steps.PieceSteps` does."""
        if self._table is None:
            first = next(one for one in experts if not isinstance(one, Made))
            self._table = ExpertTable(len(experts), first, torch.device("cpu"), lambda host: host)
        if not self._table.fill(experts):
            return None
        come()
        self._launch()
        return self.hidden

    def between(self) -> None:
        for _ in range(OPERATIONS):
            self._row.mul_(1.0)

    def forget(self) -> None:
        """What the caches hold is something else's."""
        self._others.sum()


def routings(layers: int, count: int, top_k: int, tokens: int) -> Iterator[list[torch.Tensor]]:
    """Of each token, one a layer, [1, top_k]."""
    draw = np.random.default_rng(5)
    likely = [draw.permutation(np.exp(draw.normal(0, 0.8, count))) for _ in range(layers)]
    for _ in range(tokens):
        chosen = [draw.choice(count, top_k, replace=False, p=weight / weight.sum()) for weight in likely]
        yield [torch.from_numpy(one[None]) for one in chosen]


class ForgetfulReads(UrgentSoundReads):
    """To which everything comes for the first time."""

    def __init__(self, source: ReadPool, scales: ArrivingScales):
        super().__init__(source, scales)
        self._bring, self.bring = self.bring, self._anew
        self._all_looked: dict[int, Any] = {}

    def order(self, *asked: Any, **more: Any) -> Order[Any]:
        order = super().order(*asked, **more)
        self._all_looked[order.address] = order.looked
        return order

    def _anew(self, brought: Sequence[Brought[Any]], *rest: Any) -> Come:
        for order, *_ in brought:
            order.looked = self._all_looked[order.address]
        return self._bring(brought, *rest)

    def read_each(self, *asked: Any, **more: Any) -> None:
        self._forget()
        super().read_each(*asked, **more)

    def _forget(self) -> None:
        self._seen.clear()
        self._sound.clear()


def beside_card(skeleton: Skeleton, room: ExpertRoom, hidden: int) -> BesideCard:
    """The CPU's side of a split."""
    units = {layer: ExpertUnits(module) for layer, module in layers_with_experts(skeleton.layers)}
    views = SlotViews({key: layout.tensors for key, layout in room.layouts.items()})

    def unit_of(layer: int, expert: int, slot: int, buffer: torch.Tensor) -> HostFfn:
        return units[layer].of(expert, views.of((layer, expert), slot, buffer))

    experts, _ = room.decided
    card: Any = IdleCard()
    shape = 1, experts.top_k, hidden
    return BesideCard(SPLIT, experts.expert_bytes, HostPool(most_threads()), unit_of, shape, card, torch.device("cpu"))


@contextmanager
def opened(
    checkpoint: Path, vram: int, dram: int, reads: Reads, first: bool, how: dict[str, Any], hidden: int, split: bool, cold_bytes: int
) -> Iterator[Tiers]:
    """The card's tier, its experts, the readers, and what computes. ``first``: all that is read comes for the first time. ``hidden``:
    columns of rows. ``split``: the CPU computes with some."""
    skeleton = open_skeleton(checkpoint, [ExpertsInTurn()])
    experts = spec_from_checkpoint(checkpoint).experts
    room = ExpertRoom.of(experts, ExpertSlots(vram, dram), True, skeleton.store, skeleton.layers)
    arena = Arena(max(1, room.dram_bytes))
    arena.occupy(None)
    with closing(arena), ReadPool(*reads, **how) as pool:
        scales = ArrivingScales(scale for scale in skeleton.store.scales if scale.comes_with_weights)
        host = ExpertHost(room, arena, 0, (ForgetfulReads if first else UrgentSoundReads)(pool, scales))
        slots, nbytes = room.vram_share
        shared = torch.zeros(nbytes, dtype=torch.uint8)
        device: Any = IdleCard()
        beside = beside_card(skeleton, room, hidden) if split else None
        more = NoClock(), Ledger(), 32 << 20, 2, beside
        card = CardExperts(room.on_card, [shared] * slots, host.vram_cache, host.dram, device, *more)
        for arrival, _ in host.dram.preload(pool) if dram else ():
            arrival.wait()
        card.keep_first()
        if dram:
            card.start()
        if beside is not None:
            beside.prepare({key: host.dram.place(*key) for key in room.layouts})
        gc.collect()
        gc.freeze()  # as a server does
        with closing(host.dram), nullcontext() if beside is None else closing(beside):
            launches = Launches(layer_experts(skeleton.layers), hidden, room.decided[0].top_k, cold_bytes)
            for layer in launches.layers:
                layer.feed(card)
            yield card, room, pool, launches


def measured(cases: Mapping[str, Tiers], tokens: int, warm: int) -> dict[str, dict[str, float]]:
    """Of ``tokens`` tokens behind ``warm``, which the cases take in turns."""
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in cases}
    before = dict.fromkeys(cases, (0, 0))
    cpu, wall = time.thread_time, time.perf_counter
    experts, _ = next(iter(cases.values()))[1].decided
    for number, token in enumerate(routings(len(experts.layers), experts.count, experts.top_k, warm + tokens)):
        for name, (card, _, _, launch) in cases.items():
            if number == warm:
                rows[name].clear()
                before[name] = card.stats.misses, card._dram.stats.misses
            for layer, chosen in zip(launch.layers, token, strict=True):
                launch.forget()
                spent_s, wall_0 = layer.issued.seconds, wall()
                launch.visit(layer, chosen)
                cpu_1, wall_1 = cpu(), wall()
                card.route(chosen, launch.hidden)
                cpu_2, wall_2 = cpu(), wall()
                launch.between()
                rows[name].append((layer.issued.seconds - spent_s, wall_1 - wall_0, cpu_2 - cpu_1, wall_2 - wall_1, wall() - wall_2))
    return {name: spent(rows[name]) | missed(card, before[name], len(rows[name])) for name, (card, *_) in cases.items()}


def spent(rows: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """Means and medians, microseconds."""
    found = {}
    for name, column in zip(("visit", "visit_wall", "behind", "behind_wall", "between_wall"), zip(*rows, strict=True), strict=True):
        found |= {name: round(mean(column) * 1e6, 1), f"{name}_median": round(median(column) * 1e6, 1)}
    return found


def missed(card: CardExperts, before: tuple[int, int], visits: int) -> dict[str, float]:
    """A visit."""
    found = zip((card.stats.misses, card._dram.stats.misses), before, strict=True)
    return dict(zip(("missed", "read"), [round((now - then) / visits, 2) for now, then in found], strict=True))


@contextmanager
def reading(pool: ReadPool, room: ExpertRoom) -> Iterator[None]:
    """Inside, all of ``pool``'s threads have something to read: two requests of `TOGETHER` experts are under way."""
    layouts, over, ended = [*room.layouts.values()], threading.Event(), threading.Semaphore(0)
    room_bytes = align_up(max(layout.nbytes for layout in layouts))

    def request(first: int) -> tuple[Extent, ...]:
        chosen = layouts[first : first + TOGETHER]
        return tuple(replace(e, dest=e.dest + i * room_bytes) for i, layout in enumerate(chosen) for e in layout.extents)

    requests = [request(first) for first in range(0, len(layouts) - TOGETHER, TOGETHER)]
    buffers = [memoryview(mmap.mmap(-1, TOGETHER * room_bytes)) for _ in range(2)]

    def go_on(number: int, error: BaseException | None = None) -> None:
        if over.is_set() or error is not None:
            ended.release()
        else:
            pool.read(requests[number % len(requests)], buffers[number % 2], partial(go_on, number + 2))

    go_on(0)
    go_on(1)
    try:
        yield
    finally:
        over.set()
        for _ in buffers:
            ended.acquire()


def main(arguments: Sequence[str]) -> None:
    given = given_of(arguments, ("work", "tokens", "warm", "threads", "layers", "hidden", "block", "cases", "cold"))
    work = Path(given.get("work", "bench-work")).resolve()
    shape = {"layers": given.get("layers", "12"), "hidden": given.get("hidden", "352"), "vocab": "1024"}
    checkpoint = work / f"visit-host-{shape['layers']}-{shape['hidden']}"
    if not checkpoint.exists():
        write_gpt_oss(gpt_oss_config(shape), checkpoint)
        os.sync()
    experts = spec_from_checkpoint(checkpoint).experts
    assert experts is not None, "gpt-oss has them"
    units, tokens, warm = experts.units, int(given.get("tokens", "60")), int(given.get("warm", "200"))
    ways: dict[str, dict[str, Any]] = {"": {}, "_python": {"preadv": lambda *read: os.preadv(*read)}}
    vram = round(VRAM_SHARE * units)
    half = vram, units // 2
    hidden, cold_bytes = int(shape["hidden"]), parse_bytes(given.get("cold", "0")) or 0
    slots = {"vram": (units, 0), "dram": (vram, units), "split": (vram, units), "ssd": half, "first": half, "ssd_python": half}
    reads = Reads(int(given.get("threads", "8")), parse_bytes(given.get("block", "256KiB")) or 0)

    def tiers(vram: int, dram: int, name: str) -> AbstractContextManager[Tiers]:
        how = ways["_python" if name.endswith("_python") else ""]
        return opened(checkpoint, vram, dram, reads, name == "first", how, hidden, name == "split", cold_bytes)

    cases = given.get("cases", ",".join((*slots, *BUSY))).split(",")
    with ExitStack() as stack:
        taken = {name: stack.enter_context(tiers(*held, name)) for name, held in slots.items() if name in cases}
        table = measured(taken, tokens, warm) if taken else {}
    for name in (name for name in BUSY if name in cases):
        with tiers(units, 0, name) as made, reading(made[2], made[1]):
            table |= measured({name: made}, tokens, warm)
    for name, found in table.items():
        print(f"{name:12}", " ".join(f"{key} {value}" for key, value in found.items() if not key.endswith("_median")), flush=True)
    print(json.dumps({"load": os.getloadavg()[0], "cases": table}))


if __name__ == "__main__":
    main(sys.argv[1:])
