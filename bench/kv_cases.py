"""What the processes of ``bench/kv_reuse.py`` measure, beside what its bounds consist of."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from statistics import median
from typing import Any, NamedTuple

from bench.kv_rates import LAUNCHES, RATES, LaunchRate
from bench.kv_rig import Pretended, Rig
from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.kv.disk.page_index import INDEX
from penstock.runtime.kv.disk.page_record import checksum_of
from penstock.runtime.kv.disk.segments import SegmentFiles, aligned
from penstock.runtime.kv.pages.prefix import Prefix
from penstock.runtime.kv.pages.worth import Worth


@dataclass
class Samples:
    """Of one tier: each restored prompt, and what was measured right after it. The first ones warm up."""

    ttft_s: list[float] = field(default_factory=list)
    tail_s: list[float] = field(default_factory=list)
    layer_launch_s: list[float] = field(default_factory=list)
    tier_gbps: list[float] = field(default_factory=list)

    def median(self, name: str) -> float:
        return median(getattr(self, name)[1:])


def measured_ttft(rig: Rig, prefix_tokens: int, tail_tokens: int, repeats: int, seed: int) -> dict[str, Any]:
    """Seconds to the first token of a prompt whose first ``prefix_tokens`` lie in each tier, beside what its bound consists of."""
    head, tails = _ids(rig, prefix_tokens, seed), count(seed + 1)
    prompts = [[*head, *_ids(rig, tail_tokens, next(tails))] for _ in range(repeats + 1)]

    def fresh() -> list[int]:
        return [*head, *_ids(rig, tail_tokens, next(tails))]

    pages = prefix_tokens // rig.shape.page_tokens
    start, nbytes = pages * rig.shape.page_tokens, pages * rig.shape.payload_bytes
    host, warm = LaunchRate(rig), {str(tier): Samples() for tier in Tier}

    def restored(cache: Prefix, tier: str) -> None:
        warm[tier].ttft_s.append(_restored(rig, cache, fresh(), tier))

    def beside(tier: str) -> None:
        """What a restored prompt is compared with, right after it: on shared machines hosts and drives drift by half within a minute."""
        samples = warm[tier]
        samples.tail_s.append(rig.generate(fresh(), Pretended(start)).prefill_s)
        samples.layer_launch_s.append(median(host.samples(LAUNCHES)))
        if tier in RATES:
            samples.tier_gbps.append(RATES[tier](rig, nbytes))

    with rig.prefix() as cache:
        cold = [rig.generate(prompts[0], cache).prefill_s]
        rig.disk.flush()
        for _ in prompts:
            cache.forget()
            restored(cache, "dram")
            beside("dram")
        skipped = cache.facts()["pages_skipped"]
    cold += [rig.generate(prompt, None).prefill_s for prompt in prompts[1:]]
    for _ in prompts:
        with rig.prefix() as cache:
            restored(cache, "ssd")
        beside("ssd")
    if rig.engine.card is not None:
        with rig.prefix() as cache:
            rig.generate(prompts[0], cache)
            for _ in prompts:
                restored(cache, "vram")
                beside("vram")
    read_gbps, tiers = warm["ssd"].median("tier_gbps"), {}
    by_probe = Worth(rig.plan, read_gbps)
    for name in (name for name, samples in warm.items() if samples.ttft_s):
        now, parts = warm[name], {Tier(name): pages}
        launching = replace(rig.plan, hardware=replace(rig.plan.hardware, layer_launch_s=now.median("layer_launch_s")))
        by_these = Worth(launching, read_gbps)
        length, gbps = len(prompts[0]), now.median("tier_gbps") if now.tier_gbps else None
        foreseen_s = by_probe.restore_s(parts) + by_probe.prefill_s([length], [start])
        tiers[name] = {
            "ttft_s": now.median("ttft_s"),
            "tail_s": now.median("tail_s"),
            "tier_gbps": gbps,
            "layer_launch_s": now.median("layer_launch_s"),
            "bound_s": (nbytes / GB / gbps if gbps else 0.0) + now.median("tail_s"),
            "predicted_s": by_these.restore_s(parts) + by_these.prefill_s([length], [start]),
            "predicted_by_probe_s": foreseen_s,
            "would_restore": foreseen_s < by_probe.prefill_s([length], [0]),
            "each": asdict(now),
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


def _ids(rig: Rig, tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(rig.plan.model.vocab) for _ in range(tokens)]
