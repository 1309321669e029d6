"""What the processes of ``bench/kv_reuse.py`` measure: an engine with a prefix cache, and what its tiers give without it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any, NamedTuple

import torch

from planner.decisions import Tier
from planner.plan import Plan
from planner.units import GB
from runtime.cuda import open_cuda
from runtime.device import CopyDevice
from runtime.engine import Engine, EngineOptions
from runtime.generate import Batch, Generation, Sampler, Sampling, generate
from runtime.kv.contiguous import Pair
from runtime.kv.index import INDEX
from runtime.kv.keeping import open_pages, page_shape
from runtime.kv.pages import Tokens
from runtime.kv.prefix import Prefix
from runtime.kv.record import PageShape, checksum_of
from runtime.kv.room import page_room
from runtime.kv.segments import SegmentFiles, aligned
from runtime.kv.worth import Worth
from runtime.kv.writer import DiskWriter
from runtime.model import import_model, open_skeleton
from runtime.schema import ReuseConfig

ANY_RATE = 1e9
"""GB/s of a disk that is always worth reading from: the benchmark measures what a user's run might decline."""


class Pretended:
    """In place of a prefix cache: rows before ``start`` count as restored, whatever lies there."""

    def __init__(self, start: int):
        self._start = start

    def restore(self, prompts: Tokens, pairs: Sequence[Pair]) -> int:
        return self._start

    def confirm(self) -> int:
        return self._start

    def keep(self, sequences: Tokens) -> None:
        """Nothing is kept."""

    advance = finish = keep


@dataclass(frozen=True)
class Rig:
    """An engine for prompts of ``length`` tokens, and the directory of pages."""

    engine: Engine
    plan: Plan
    shape: PageShape
    disk: DiskWriter
    device: torch.device
    open_s: float
    """Seconds to open the directory, its index that is."""

    @property
    def readers(self) -> int:
        return self.plan.decisions.weights.ssd.queue_depth

    def batch(self, prompt: Sequence[int], new_tokens: int = 1) -> Batch:
        return Batch([prompt], new_tokens, self.plan.workload.max_tokens, self.plan.decisions.prefill_chunk_tokens)

    def generate(self, prompt: Sequence[int], prefix: Any, new_tokens: int = 1, progress: Callable | None = None) -> Generation:
        batch = self.batch(prompt, new_tokens)
        return generate(self.engine.sequences(batch, prefix), batch, Sampler(Sampling(), self.device), progress=progress)

    @contextmanager
    def prefix(self, kept: bool = False, disk: bool = True) -> Iterator[Prefix]:
        """A cache with nothing in memory; with ``kept`` pages stay in VRAM."""
        memory = self.engine.page_memory
        if memory.kept is not None and not kept:
            memory = replace(memory, kept=memory.kept[:0])
        with closing(Prefix(self.shape, self.plan, memory, self.disk if disk else None, ANY_RATE, self.readers)) as prefix:
            yield prefix


@contextmanager
def opened(plan: Plan, checkpoint: Path, directory: Path, copier: CopyDevice | None, device: torch.device) -> Iterator[Rig]:
    """Load ``checkpoint``; ``copier`` is None to compute on the CPU."""
    cfg = ReuseConfig(dir=str(directory), limit_bytes=1 << 50)
    import_model(checkpoint)
    skeleton = open_skeleton(checkpoint)
    shape = page_shape(plan, checkpoint, skeleton.model)
    with ExitStack() as stack:
        options = EngineOptions(page_room=page_room(cfg, plan))
        engine = stack.enter_context(closing(Engine(plan, skeleton, copier, device, options)))
        begun = time.perf_counter()
        disk = stack.enter_context(open_pages(cfg, plan, shape))  # closed first: it writes from the engine's memory
        rig = Rig(engine, plan, shape, disk, device, time.perf_counter() - begun)
        engine.load(rig.batch([0] * plan.workload.prompt_tokens), lambda *_: None)
        yield rig


def measured_ttft(rig: Rig, prefix_tokens: int, tail_tokens: int, repeats: int, seed: int) -> dict[str, Any]:
    """Seconds to the first token of a prompt whose first ``prefix_tokens`` lie in each tier, beside what its bound consists of."""
    head, tails = _ids(rig, prefix_tokens, seed), count(seed + 1)
    prompts = [[*head, *_ids(rig, tail_tokens, next(tails))] for _ in range(repeats + 1)]

    def fresh() -> list[int]:
        return [*head, *_ids(rig, tail_tokens, next(tails))]

    pages = prefix_tokens // rig.shape.page_tokens
    start, nbytes = pages * rig.shape.page_tokens, pages * rig.shape.payload_bytes
    warm: dict[str, list[float]] = {}
    tails_s: dict[str, list[float]] = {}

    def sample(cache: Prefix, tier: str) -> None:
        """A tail alone right after each restored prompt: how fast a host launches drifts by half within a minute on shared machines."""
        warm.setdefault(tier, []).append(_restored(rig, cache, fresh(), tier))
        tails_s.setdefault(tier, []).append(rig.generate(fresh(), Pretended(start)).prefill_s)

    with rig.prefix() as cache:
        cold = [rig.generate(prompts[0], cache).prefill_s]
        rig.disk.flush()
        for _ in prompts:
            sample(cache, "dram")
        skipped = cache.facts()["pages_skipped"]
    cold += [rig.generate(prompt, None).prefill_s for prompt in prompts[1:]]
    for _ in prompts:
        with rig.prefix() as cache:
            sample(cache, "ssd")
    if rig.engine.page_memory.kept is not None and len(rig.engine.page_memory.kept) >= pages:
        with rig.prefix(kept=True) as cache:
            rig.generate(prompts[0], cache)
            for _ in prompts:
                sample(cache, "vram")
    rates = {name: rate(rig, nbytes) for name, rate in RATES.items() if name in warm}
    worth = Worth(rig.plan, rates["ssd"])
    whole_s = worth.prefill_s(1, len(prompts[0]), 0)
    tiers = {}
    for name, seconds in warm.items():
        predicted_s = worth.restore_s({Tier(name): pages}) + worth.prefill_s(1, len(prompts[0]), start)
        tail_s = median(tails_s[name][1:])
        tiers[name] = {
            "ttft_s": median(seconds[1:]),
            "each_s": seconds,
            "tail_s": tail_s,
            "tails_s": tails_s[name],
            "tier_gbps": rates[name],
            "bound_s": nbytes / GB / rates[name] + tail_s,
            "predicted_s": predicted_s,
            "would_restore": predicted_s < whole_s,
        }
    return {
        "prefix_tokens": prefix_tokens,
        "restored_tokens": start,
        "restored_bytes": nbytes,
        "page_bytes": rig.shape.payload_bytes,
        "cold_s": median(cold[1:]),
        "pages_skipped": skipped,
        "tiers": tiers,
    }


def fill_store(rig: Rig, prefix_tokens: int, nbytes: int, seed: int) -> dict[str, Any]:
    """Keep the prompt that a restart asks for, then pages that nobody asks for, until the directory holds ``nbytes``. The bytes of those
    are the same, their keys are not."""
    disk = rig.disk
    with rig.prefix() as cache:
        rig.generate(_ids(rig, prefix_tokens, seed), cache)
    disk.flush()
    payload, noise = aligned(disk.shape.payload_bytes), os.urandom(1 << 16)
    payload[:] = (noise * (len(payload) // len(noise) + 1))[: len(payload)]
    checksum = checksum_of(payload)
    held = sum(stat.st_size for stat in SegmentFiles(disk.directory).found().values())
    for _ in range(max(0, nbytes - held) // disk.shape.record_bytes):
        while not disk.put(os.urandom(16), bytes(16), payload, checksum, lambda _: None):
            disk.flush()
    disk.flush()
    return disk.counters()


def measured_restart(rig: Rig, prefix_tokens: int, tail_tokens: int, seed: int) -> dict[str, Any]:
    """The first request of a process whose directory holds its beginning among much else."""
    prompt = [*_ids(rig, prefix_tokens, seed), *_ids(rig, tail_tokens, seed + 1)]
    start = prefix_tokens // rig.shape.page_tokens * rig.shape.page_tokens
    rig.generate(prompt, Pretended(start))  # what a first pass loads is no part of restoring
    with rig.prefix() as cache:
        ttft_s = _restored(rig, cache, prompt, "ssd")
        facts = cache.facts()
    return {
        "store_bytes": sum(stat.st_size for stat in SegmentFiles(rig.disk.directory).found().values()),
        "index_bytes": (rig.disk.directory / INDEX).stat().st_size,
        "open_s": rig.open_s,
        "restore_s": facts["restore_s"],
        "ttft_s": ttft_s,
        "restored_bytes": facts["restored_bytes"]["ssd"],
        "read_bytes": facts["disk"]["read_bytes"],
    }


def measured_writeback(rig: Rig, prefix_tokens: int, new_tokens: int, repeats: int, seed: int) -> dict[str, Any]:
    """Decode steps and whole batches with their pages copied out and written, and without: ``repeats`` of each in shuffled order, after one
    of each that warms up. Steps count as long as pages were left to copy out in every repeat, the time between steps included."""
    draw, runs = random.Random(seed), {False: [], True: []}
    order = [True, False] * repeats
    draw.shuffle(order)
    for i, kept in enumerate([False, True, *order]):
        prompt = _ids(rig, prefix_tokens, seed + i)
        if kept:
            with rig.prefix() as cache:
                run = _clocked(rig, prompt, cache, new_tokens)
                facts = cache.facts()  # waits for the disk, so that no batch runs beside the writing of the one before
        else:
            run = _clocked(rig, prompt, None, new_tokens)
        if i > 1:
            runs[kept].append(run)
    steps = max(1, min(run.copying for run in runs[True]))
    return {
        "prefix_tokens": prefix_tokens,
        "repeats": repeats,
        "steps": steps,
        "pages_captured": facts["pages_captured"],
        "pages_skipped": facts["pages_skipped"],
        "pages_at_the_end": _spread([run.left for run in runs[True]]),
        "finish_s": _spread([run.finish_s for run in runs[True]]),
        "finish_share": _spread([run.finish_s / run.batch_s for run in runs[True]]),
        "without": {"step_s": _spread(_steps(runs[False], steps)), "batch_s": _spread([run.batch_s for run in runs[False]])},
        "during": {"step_s": _spread(_steps(runs[True], steps)), "batch_s": _spread([run.batch_s for run in runs[True]])},
    }


def link_gbps(rig: Rig, nbytes: int) -> float:
    """Whole pages from the arena, one after the other: over the link, or, without a card, to memory that is there already."""
    memory, size = rig.engine.page_memory, rig.shape.payload_bytes
    pages = list(islice(cycle(memory.tensor.split(size)), nbytes // size))
    if memory.device is None:
        targets = torch.zeros(min(4, len(pages)), size, dtype=torch.uint8)
        return _median_gbps(nbytes, lambda: [targets[i % len(targets)].copy_(page) for i, page in enumerate(pages)])
    lane, device = memory.device.lane(), memory.device

    def copy() -> None:
        lane.copy((memory.bounce[i % len(memory.bounce)], page) for i, page in enumerate(pages))
        device.host_waits(lane.event())

    return _median_gbps(nbytes, copy)


def card_gbps(rig: Rig, nbytes: int) -> float:
    """Whole pages within VRAM."""
    memory, size = rig.engine.page_memory, rig.shape.payload_bytes

    def copy() -> None:
        for i in range(nbytes // size):
            memory.bounce[i % len(memory.bounce)].copy_(memory.kept[i])
        memory.device.host_waits(memory.device.compute_event())

    return _median_gbps(nbytes, copy)


def disk_gbps(rig: Rig, nbytes: int) -> float:
    """Pages of the directory into the arena by as many threads as restoring uses, without a look at them."""
    files, size, record = SegmentFiles(rig.disk.directory), rig.shape.payload_bytes, rig.shape.record_bytes
    found = sorted(files.found().items())
    places = [(number, slot * record) for number, stat in found for slot in range(stat.st_size // record)]
    memory = rig.engine.page_memory
    slots: SimpleQueue[memoryview] = SimpleQueue()
    for i in range(min(2 * rig.readers, len(memory.view) // size)):
        slots.put(memory.view[i * size : (i + 1) * size])

    def read(place: tuple[int, int]) -> None:
        view = slots.get()
        files.read(place[0], [view], place[1] + record - size)
        slots.put(view)

    with ThreadPoolExecutor(rig.readers) as pool:
        return _median_gbps(nbytes, lambda: list(pool.map(read, islice(cycle(places), nbytes // size))))


RATES: dict[str, Callable[[Rig, int], float]] = {"vram": card_gbps, "dram": link_gbps, "ssd": disk_gbps}
"""Tier -> the rate at which it gives pages, GB/s."""


def device_of(plan: Plan) -> tuple[CopyDevice | None, torch.device]:
    """What the plan computes on, opened."""
    device = torch.device("cuda", 0) if plan.hardware.gpu else torch.device("cpu")
    return open_cuda(plan, device), device


def _restored(rig: Rig, cache: Prefix, prompt: Sequence[int], tier: str) -> float:
    """Seconds to the first token. RuntimeError when the prompt's beginning came from elsewhere."""
    seconds = rig.generate(prompt, cache).prefill_s
    got = cache.facts()["requests"][-1]["restored_tokens"]
    if {name for name, tokens in got.items() if tokens} != {tier}:
        raise RuntimeError(f"the prefix was to come from {tier}; restored were {got}")
    return seconds


class Clocked(NamedTuple):
    """One batch."""

    step_s: list[float]
    """From token to token."""
    batch_s: float
    """From its beginning until everything that is kept of it lies in DRAM."""
    finish_s: float
    """Of that, after the last token."""
    copying: int
    """Steps at whose beginning pages were still to be copied out."""
    left: int
    """Pages that were, after the last token."""


def _clocked(rig: Rig, prompt: Sequence[int], cache: Prefix | None, new_tokens: int) -> Clocked:
    times: list[float] = []
    pending: list[int] = []

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "decode":
            times.append(time.perf_counter())
            pending.append(cache.pending if cache is not None else 0)

    begun = time.perf_counter()
    rig.generate(prompt, cache, new_tokens, progress)
    ended = time.perf_counter()
    step_s = [after - before for before, after in zip(times, times[1:], strict=False)]
    return Clocked(step_s, ended - begun, ended - times[-1], sum(n > 0 for n in pending[:-1]), pending[-1])


def _steps(runs: Iterable[Clocked], steps: int) -> list[float]:
    """The mean of each one's first ``steps``."""
    return [sum(run.step_s[:steps]) / steps for run in runs]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "least": min(values), "most": max(values)}


def _median_gbps(nbytes: int, act: Callable[[], object], times: int = 3) -> float:
    """After one that warms up."""
    rates = []
    for _ in range(times + 1):
        begun = time.perf_counter()
        act()
        rates.append(nbytes / GB / (time.perf_counter() - begun))
    return median(rates[1:])


def _ids(rig: Rig, tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(rig.plan.model.vocab) for _ in range(tokens)]
