"""All measurements in their order, and the profile made of them.

Order: what is only read from the kernel, then DRAM, the processor, the GPU, and the SSD with all the time that is left. One measurement's
failure is recorded in its figure's origin and the rest goes on. An unmeasured rate is 0, an unmeasured table has no rows, and its origin
begins with ``findings.UNMEASURED``.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.planner.asked.verb_schema import ProbeSettings
from penstock.planner.common.errors import UserError
from penstock.planner.common.host_memory import last_level_cache_bytes, memory_facts, uncached_bytes, usable_cores
from penstock.planner.common.interrupt import import_torch, terminate_as_interrupt
from penstock.planner.common.measures import show_bytes
from penstock.planner.common.origins import unmeasured
from penstock.planner.common.outside.machine_load import Load, Watch
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.config.config_schema import (
    CardConfig,
    CpuConfig,
    DramConfig,
    HardwareConfig,
    HostConfig,
    LinksConfig,
    SsdConfig,
)
from penstock.planner.probe.best_block import sweep, table
from penstock.planner.probe.bus_rate import measure_bus
from penstock.planner.probe.card_figures import NO_ARENA, card_config, measure_card, peak_gbps
from penstock.planner.probe.cpu_rates import measure_cpu
from penstock.planner.probe.dram_rates import Arena, mlock
from penstock.planner.probe.findings import CannotMeasure, Figure, Findings
from penstock.planner.probe.gpu_rates import Gpu, host_register
from penstock.planner.probe.layer_launch import measure_launch
from penstock.planner.probe.other_cards import OtherCard, measure_others
from penstock.planner.probe.runtime_rates import (
    DECODERS,
    HOPS,
    LINKS,
    PRODUCTS,
    PROMPTS,
    measure_decoders,
    measure_hops,
    measure_links,
    measure_products,
    measure_prompts,
)
from penstock.planner.probe.scratch_file import MEMORY, Cursor, Target, existing_files, file_system, free_bytes, scratch_bytes, scratch_file
from penstock.planner.probe.ssd_rates import SLICE_S, STEADY, Buffers, fill_scratch, read_long, read_sampler
from penstock.planner.probe.watched.clocked import FULL, QUICK, Meter, Shares

DRAM_SHARE = 4
"""The DRAM mapping takes at most one part in this many of what a plan could use, and so does a scratch file in memory."""
_DRAM = ("dram.pin_s_per_gb", "dram.copy_gbps", "dram.bus_gbps")
_COUNTED = ("dram_bytes", "ssd_bytes", "vram_bytes", "cpu.cores", "cpu.threads", "gpu.name", "gpu.context_bytes")
"""Figures that no load changes."""
UNSTEADY = 1.25
"""Of a point's samples the largest over the smallest, from which on its rate is called unsteady; the outermost tenths are left out."""
_CPU = ("cpu.matvec_gbps", "cpu.threads", "cpu.dense_tflops", "cpu.attention_gbps", "cpu.attention_tflops")


@dataclass(frozen=True)
class Probed:
    """What was measured, and what else the machine did meanwhile."""

    profile: HardwareConfig
    load: Load


def probe(settings: ProbeSettings, shares: Shares | None = None) -> Probed:
    """Measure the machine within ``shares`` (by default 60 s in all, 15 s when ``settings.quick``).

    ``settings.path`` is a directory on the file system whose SSD is measured; UserError when it is none. ``settings.gpu`` other than 0
    must be there: UserError. Where 0 is not, the CPU alone is measured. Memory: the arena, which the SSD is read into as well (2.1 GB, or
    more where caches are large; a quarter of the DRAM that is free at most), and about as much in processes of their own, one after the
    other. On a file system in memory the scratch file takes up to another quarter. Leaves no file behind.
    """
    directory = user_path(settings.path)
    if not directory.is_dir():
        raise UserError(f"probe.path={settings.path} is not a directory; name a directory on the file system that holds the checkpoint")
    shares = shares or (QUICK if settings.quick else FULL).holding(uncached_bytes())
    found = Findings(datetime.date.today().isoformat())
    watch = Watch()
    with terminate_as_interrupt(), Meter(shares.total_s) as meter, ExitStack() as held:
        meter.say("memory")
        facts = memory_facts()
        found.add(Figure("dram_bytes", facts.plan_bytes, facts.describe()))
        found.add(Figure("cpu.cores", usable_cores(), "affinity and cgroup quota"))
        meter.say("loading torch, looking for a GPU")
        gpu = _open_gpu(settings.gpu, found)
        if gpu is None and settings.gpu:
            why = found.origin["gpu"].removeprefix("not measured: ").removeprefix(f"probe.gpu={settings.gpu}: ")
            raise UserError(f"probe.gpu={settings.gpu}: {why}; choose another, or leave it out to measure the first one, or the CPU alone")
        arena = _measure_dram(found, meter, shares, facts.plan_bytes, gpu, held)
        others = _measure_compute(found, meter, shares, arena, gpu, held)
        _measure_ssd(found, meter, shares, directory, arena)
        load = watch.load(os.cpu_count() or 1)
        if load.busy:
            found.mark("busy", [path for path in found.origin if path not in _COUNTED])
        return Probed(_profile(settings.name, found, gpu, others), load)


def _open_gpu(index: int, found: Findings) -> Gpu | None:
    """The GPU, or None with the reason in the findings."""
    opened: list[Gpu] = []

    def start() -> Iterator[Figure]:
        try:
            import_torch()
            opened.append(Gpu(index))
        except ImportError as error:
            raise CannotMeasure(f"torch cannot be imported: {error}") from error
        yield from opened[0].identity()

    found.attempt(("gpu",), start)
    if not opened:
        return None
    found.origin.pop("gpu", None)
    return opened[0]


def _measure_dram(found: Findings, meter: Meter, shares: Shares, plan_bytes: int, gpu: Gpu | None, held: ExitStack) -> Arena | None:
    """Page-locking, copy and the bus; the mapping stays until ``held`` closes."""
    meter.say("DRAM: page-locking, copy, bus")
    made: list[Arena] = []

    def measure() -> Iterator[Figure]:
        arena = Arena(min(shares.arena_bytes, plan_bytes // DRAM_SHARE), int(found.number("cpu.cores")))
        lock = host_register() if gpu else mlock()
        held.callback(arena.close, lock)
        made.append(arena)
        yield from arena.pinning(lock)
        yield from arena.rates(shares.dram_s)
        yield from measure_bus(arena, shares.dram_s, partial(gpu.feeding, arena) if gpu and arena.locked else None)

    found.attempt(_DRAM, measure)
    return made[0] if made else None


def _measure_compute(
    found: Findings, meter: Meter, shares: Shares, arena: Arena | None, gpu: Gpu | None, held: ExitStack
) -> list[CardConfig]:
    """The processor's rates, then the GPU's and its link's -> the cards that are unlike it."""
    device = gpu.device if gpu else "cpu"
    synchronize = gpu.synchronize if gpu else lambda: None

    def cpu() -> Iterator[Figure]:
        if arena is None:
            raise NO_ARENA
        held.enter_context(_threads_restored())
        yield from _with_torch(lambda: measure_cpu(arena, shares.cpu_s, last_level_cache_bytes()))

    meter.say("CPU: matrix-vector and matrix rate")
    found.attempt(_CPU, cpu)
    _measure_decoders(found, meter, shares, gpu)
    meter.say("launching a decoder layer")
    found.attempt(("layer_launch_s",), lambda: _with_torch(lambda: measure_launch(device, shares.cpu_s / 3, synchronize)))
    if gpu is None:
        if shares.links_s and found.number("cpu.cores") > 1:
            meter.say("hops between two processes")
            found.attempt(HOPS, lambda: measure_hops(shares.links_s))
        return []
    meter.say("GPU: link and compute")
    measure_card(found, gpu, arena, shares.gpu_s)
    if shares.links_s:
        meter.say("launching a recorded layer of a prompt")
        found.attempt(PROMPTS, lambda: measure_prompts(shares.cpu_s / 3, gpu.index))
    if arena is None:
        return []
    if shares.products_s:
        meter.say("CPU products beside the link")
        cores, bus = int(found.number("cpu.cores")), found.number("dram.bus_gbps")
        found.attempt(PRODUCTS, lambda: measure_products(shares.products_s, cores, gpu.index, bus))
    others = _measure_others(found, meter, shares, gpu, arena)
    _measure_links(found, meter, shares, gpu, others)
    return [other.config for other in others]


def _measure_others(found: Findings, meter: Meter, shares: Shares, gpu: Gpu, arena: Arena) -> list[OtherCard]:
    """Cards that are unlike ``gpu``."""

    def more(own: Findings, other: Gpu) -> None:
        own.add(Figure("cpu.threads", int(found.number("cpu.threads")), "as beside the first GPU"))
        _measure_decoders(own, meter, shares, other)

    def opened(index: int) -> Gpu:
        meter.say(f"GPU {index}, of another kind: link and compute")
        return Gpu(index)

    return measure_others(found, gpu, arena, shares.gpu_s, more, opened)


def _measure_links(found: Findings, meter: Meter, shares: Shares, gpu: Gpu, others: Sequence[OtherCard] = ()) -> None:
    """Of all GPUs that plans may use, where there are several, those like ``gpu`` first: each alone, and all at once."""
    alike, own_gbps = gpu.alike(), peak_gbps(found)
    if len(alike) + len(others) < 2:
        return
    peaks = dict.fromkeys(alike, own_gbps) | {other.config.device: other.peak_gbps for other in others}
    unlike = f", and {len(others)} unlike it" if others else ""
    found.add(Figure("devices", list(peaks), f"{len(alike)} of {gpu.name}{unlike}"))
    if not shares.links_s:
        return
    meter.say(f"links of {len(peaks)} GPUs, alone and at once")
    if not own_gbps:
        found.lack(LINKS, "the link of one GPU was not measured")
        return
    vram_bytes = int(found.number("vram_bytes"))
    found.attempt(LINKS, lambda: measure_links(shares.links_s, peaks, alike, gpu.index, vram_bytes, gpu.context_bytes))


def _measure_decoders(found: Findings, meter: Meter, shares: Shares, gpu: Gpu | None) -> None:
    """Of coded weights; where there is no time for them plans derive the rates, and nothing is said to be missing."""
    if shares.decode_s and (gpu is None or shares.products_s):
        meter.say("decoders of coded weights")
        threads, index = int(found.number("cpu.threads")), None if gpu is None else gpu.index
        found.attempt(
            DECODERS[:2] if gpu is None else DECODERS, lambda: measure_decoders(shares.decode_s, shares.decode_rows, threads, index)
        )


@contextmanager
def _threads_restored() -> Iterator[None]:
    """Torch's number of threads is afterwards what it was."""
    import_torch()
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _with_torch(measure: Callable[[], Iterator[Figure]]) -> Iterator[Figure]:
    try:
        yield from measure()
    except ImportError as error:
        raise CannotMeasure(f"torch cannot be imported: {error}") from error


def _measure_ssd(found: Findings, meter: Meter, shares: Shares, directory: Path, arena: Arena | None) -> None:
    """Write and read rates; the scratch file is gone when this returns."""
    kind, in_memory = file_system(directory), file_system(directory) in MEMORY
    kind += " (memory, not an SSD)" if in_memory else ""
    free = free_bytes(directory)
    found.add(Figure("ssd_bytes", free, f"{show_bytes(free)} free on {kind}"))

    with ExitStack() as files:
        targets: list[Target] = []

        def write() -> Iterator[Figure]:
            most = min(shares.scratch_bytes, int(found.number("dram_bytes")) // DRAM_SHARE) if in_memory else shares.scratch_bytes
            size = scratch_bytes(directory, most)
            fd, direct = files.enter_context(scratch_file(directory))
            size = size if direct or in_memory else min(size, shares.buffered_bytes)
            target, gbps = fill_scratch(fd, direct, size, shares.write_s, f"nameless scratch file of random bytes on {kind}")
            targets.append(target)
            yield Figure("ssd.write_gbps", gbps, f"{target.how}, {show_bytes(target.nbytes)}, {target.what}, flush included")

        def read() -> Iterator[Figure]:
            target, note = _read_target(directory, targets, files, found)
            cursor = Cursor(target)
            buffers = Buffers(max(shares.ssd_depths), max(shares.ssd_blocks), arena.buffer if arena else None)
            sample = read_sampler(target, cursor, buffers, shares.sample_s)
            end = time.monotonic() + max(shares.read_least_s, meter.left_s - shares.long_s)
            samples = sweep(shares.ssd_blocks, shares.ssd_depths, sample, shares.sample_s, lambda: end - time.monotonic(), meter.tick)
            counts = [len(rates) for rates in samples.values()]
            how = (
                f"{target.how}, preadv by a thread for each read in flight, from {show_bytes(target.nbytes)} of {target.what}, "
                f"cache dropped, median of {min(counts)} to {max(counts)} samples of {shares.sample_s} s{note}"
            )
            rows = table(samples)
            yield Figure("ssd.read", rows, how)
            block, depth, gbps = max(rows, key=lambda row: row[2])
            steady = _steadiness(samples[int(block), int(depth)])
            if steady:
                found.mark(steady, ["ssd.read"])
            if shares.long_s and target.repeats and not in_memory:
                meter.say("SSD: one long read")
                again = read_sampler(target, cursor, buffers, SLICE_S)
                found_long = read_long(lambda _: again(int(block), int(depth)), shares.long_s, meter.tick)
                if found_long.gbps < STEADY * gbps:
                    said = f"{shares.long_s:g} s of reads of {show_bytes(block)}, {depth:g} in flight, without a pause"
                    yield Figure("ssd.long_gbps", found_long.gbps, f"{said}, the second half")
                    yield Figure("ssd.burst_s", found_long.burst_s(gbps), f"{said}, until the rate stayed below {STEADY:.0%}")

        meter.say("SSD: write")
        found.attempt(("ssd.write_gbps",), write)
        meter.say("SSD: read over block size and queue depth")
        found.attempt(("ssd.read",), read)


def _steadiness(samples: list[float]) -> str:
    """That samples of one point differ, in words; empty where they do not."""
    cut = len(samples) // 10
    inner = sorted(samples)[cut : len(samples) - cut]
    least, most = inner[0], inner[-1]
    return f"unsteady: {least:.3g} to {most:.3g} GB/s" if most > UNSTEADY * least else ""


def _read_target(directory: Path, targets: list[Target], files: ExitStack, found: Findings) -> tuple[Target, str]:
    """The scratch file, or where there is none the directory's own large files; and a note for the origin."""
    if targets:
        return targets[0], ""
    why = unmeasured(found.origin)["ssd.write_gbps"]
    try:
        return files.enter_context(existing_files(directory)), f"; {why}"
    except CannotMeasure as error:
        raise CannotMeasure(f"{why}; {error}") from error


def _host(found: Findings) -> HostConfig | None:
    """None where the CPU's products were not measured."""
    if not found.number("host.threads"):
        return None
    attention = "attention_gbps", "attention_beside_h2d", "h2d_beside_attention"
    rates = {name: found.number(f"host.{name}") for name in ("beside_h2d", "h2d_beside", *attention)}
    threads = int(found.number("host.threads"))
    counts, halves = found.counts("host.format_threads"), found.tables("host.f16_products")
    ahead_bytes = int(found.number("host.ahead_bytes"))
    return HostConfig(threads, found.tables("host.products"), format_threads=counts, ahead_bytes=ahead_bytes, f16_products=halves, **rates)


def _links(found: Findings) -> LinksConfig | None:
    """None where neither those of several GPUs were measured, nor what goes between processes without any."""
    if not found.number("links.hop_s"):
        return None
    number = found.number
    rates = number("links.hop_s"), number("links.p2p_gbps"), number("links.word_hop_s")
    return LinksConfig(found.rows("links.together_gbps"), *rates, int(number("links.vram_bytes")) or None)


def _profile(name: str, found: Findings, gpu: Gpu | None, others: Sequence[CardConfig] = ()) -> HardwareConfig:
    number, rows = found.number, found.rows
    return HardwareConfig(
        name=name,
        vram_bytes=int(number("vram_bytes")),
        dram_bytes=int(number("dram_bytes")),
        ssd_bytes=int(number("ssd_bytes")),
        ssd=SsdConfig(rows("ssd.read"), number("ssd.write_gbps"), number("ssd.long_gbps"), number("ssd.burst_s")),
        dram=DramConfig(number("dram.copy_gbps"), number("dram.bus_gbps"), number("dram.pin_s_per_gb")),
        cpu=CpuConfig(
            int(number("cpu.cores")),
            int(number("cpu.threads")),
            number("cpu.matvec_gbps"),
            number("cpu.dense_tflops"),
            found.by_name("cpu.decode"),
            found.by_name("cpu.products"),
            number("cpu.attention_gbps"),
            number("cpu.attention_tflops"),
        ),
        gpu=None if gpu is None else card_config(gpu, found),
        host=_host(found),
        devices=[int(index) for index in found.numbers("devices")] or None,
        others=list(others),
        links=_links(found),
        layer_launch_s=number("layer_launch_s"),
        origin=dict(sorted(found.origin.items())),
    )
