"""One CUDA GPU: what its context takes, the link in both directions, and how fast it computes. Torch is imported inside.

Host memory: the arena, page-locked once by the caller through :func:`host_register`. VRAM: two buffers of the largest
chunk while the link is measured, three matrices of 235 MB while the compute rates are.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock.planner.common.measures import GB, show_bytes
from penstock.planner.probe.dram_rates import Arena, Lock
from penstock.planner.probe.driver import NvmlGpu, nvml_gpus
from penstock.planner.probe.findings import CannotMeasure, Figure

if TYPE_CHECKING:
    import torch

CHUNKS = tuple(kib * 1024 for kib in (256, 1024, 4096, 16384, 65536, 262144))
"""Copy sizes of the H2D and D2H curves."""
PASS_BYTES = 256 * 2**20
"""Bytes copied in one sample, so that fixed costs of a sample vanish."""
QUEUED = 8
"""Copies in flight while DRAM is read beside them: 10 ms at the fastest link, more than this thread ever waits for the interpreter."""
LONG_PROMPT = 8192
"""Tokens of the prompt at which attention is timed."""
SMALL_COPY = 64 * 2**10
"""Bytes of a copy of which the host's part alone is timed."""
LEAST_COPIES = 32
LAUNCHED = 64
"""Kernels that are launched before the card is waited for: as many as a decoder layer or two has."""
BUSY_CHUNK = 64 * 2**20
"""Copy size while the other direction or the bus is busy."""
REST_S, RESTS = 1.0, 3
"""Before a burst of products is timed, and how often."""
LEAST_BURST = 0.02
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all cards


class Burst(NamedTuple):
    """Of a card that has rested: how long each product takes, and for how many seconds."""

    each_s: float
    seconds: float


def burst_of(ends: Sequence[float], usual_s: float) -> Burst | None:
    """The burst of equal products that ended so many seconds behind a rest, of ``usual_s`` each in the long run: until where their means
    before and behind differ most, each weighed by its products (the least squares of one step). None where it wins less than
    ``LEAST_BURST``."""

    def between(count: int) -> float:
        before, behind = ends[count - 1] / count, (ends[-1] - ends[count - 1]) / (len(ends) - count)
        return count * (len(ends) - count) * max(0.0, behind - before) ** 2  # a clock that rises first is no burst

    if len(ends) < 2:
        return None
    count = max(range(1, len(ends)), key=between)
    each_s = ends[count - 1] / count
    return Burst(each_s, ends[count - 1]) if usual_s / each_s >= 1 + LEAST_BURST else None


def host_register() -> Lock:
    """Page-locking through CUDA, which makes copies from the memory run at the link's rate."""
    import torch

    cudart = torch.cuda.cudart()

    def lock(address: int, nbytes: int) -> str | None:
        code = int(cudart.cudaHostRegister(address, nbytes, _PORTABLE))
        return None if code == 0 else f"CUDA error {code}"

    def unlock(address: int, nbytes: int) -> None:
        with suppress(RuntimeError):  # a device that has failed has nothing in flight, and the profile is already made
            torch.cuda.synchronize()
        cudart.cudaHostUnregister(address)

    return Lock("cudaHostRegister", lock, unlock)


class Gpu:
    """GPU number ``index`` of those that CUDA shows; making one starts the CUDA context.

    Raises CannotMeasure when there is no such GPU or the context cannot start.
    """

    def __init__(self, index: int) -> None:
        import torch

        if not torch.cuda.is_available():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
            raise CannotMeasure(f"no CUDA GPU: torch {torch.__version__} ({built}) sees none")
        if not 0 <= index < torch.cuda.device_count():
            raise CannotMeasure(f"probe.gpu={index}: CUDA shows {torch.cuda.device_count()} GPUs, numbered from 0")
        self.index = index
        self.device = f"cuda:{index}"
        before, self.no_nvml = self._ask_nvml()
        torch.cuda.set_device(index)
        self._warm_libraries()
        properties = torch.cuda.get_device_properties(index)
        self.name = properties.name
        self._uuid = str(getattr(properties, "uuid", ""))
        left, self._total = torch.cuda.mem_get_info(index)
        mine = self._pick(before)
        after = self._pick(self._ask_nvml()[0])
        if mine and after and after.used_bytes > mine.used_bytes:
            self.context_bytes = after.used_bytes - mine.used_bytes
            self.context_how = "NVML's bytes in use after a first product less those before CUDA started"
        else:
            self.context_bytes = self._total - left
            self.context_how = f"all bytes in use after a first product, other processes' included ({self.no_nvml or 'NVML saw no change'})"
        self.vram_bytes = min(self._total, left + self.context_bytes)

    def alike(self) -> tuple[int, ...]:
        """Numbers of all cards of the same kind that CUDA shows, itself among them. Starts no other context."""
        return self.kinds()[self.name]

    def kinds(self) -> dict[str, tuple[int, ...]]:
        """Name -> the numbers of all such cards that CUDA shows, in their order. Starts no other context."""
        import torch

        found: dict[str, tuple[int, ...]] = {}
        for index in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_properties(index).name
            found[name] = (*found.get(name, ()), index)
        return found

    def use(self) -> None:
        """Measure on this card from now on; making another one changed that."""
        import torch

        torch.cuda.set_device(self.index)

    def leave(self) -> None:
        """Give back what measuring took of this card, which is in use."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    @staticmethod
    def _ask_nvml() -> tuple[dict[str, NvmlGpu], str]:
        try:
            return nvml_gpus(), ""
        except CannotMeasure as error:
            return {}, str(error)

    def _pick(self, gpus: dict[str, NvmlGpu]) -> NvmlGpu | None:
        found = [gpu for uuid, gpu in gpus.items() if self._uuid and uuid.removeprefix("GPU-") == self._uuid.removeprefix("GPU-")]
        return found[0] if found else next(iter(gpus.values())) if len(gpus) == 1 else None

    def _warm_libraries(self) -> None:
        import torch

        x = torch.ones(64, 64, dtype=torch.bfloat16, device=self.device)
        torch.matmul(x, x)
        torch.cuda.synchronize()
        del x
        torch.cuda.empty_cache()

    def identity(self) -> Iterator[Figure]:
        """Name with the PCIe link, memory and what the context takes."""
        mine = self._pick(self._ask_nvml()[0])
        link = mine.pcie if mine else f"PCIe link unknown ({self.no_nvml or 'NVML does not list this GPU'})"
        yield Figure("gpu.name", self.name, f"CUDA device {self.index}, {link}")
        yield Figure("gpu.context_bytes", self.context_bytes, self.context_how)
        yield Figure("vram_bytes", self.vram_bytes, f"free VRAM and this process's context, of {show_bytes(self._total)}")

    def _seconds(self, issue: Callable[[], object], stream: torch.cuda.Stream | None = None) -> float:
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream or torch.cuda.current_stream()):
            start.record()
            issue()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _median(self, issue: Callable[[], object], seconds: float, least: int = 3) -> float:
        import torch

        self._seconds(issue)
        torch.cuda.synchronize()
        durations: list[float] = []
        end = time.perf_counter() + seconds
        while len(durations) < least or time.perf_counter() < end:
            durations.append(self._seconds(issue))
        return statistics.median(durations)

    def _rested(self, issue: Callable[[], object], seconds: float) -> list[float]:
        """When each of what ``issue`` launches ended, for ``seconds`` from a rest on; the card never waits for this thread."""
        import torch

        def mark() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        torch.cuda.synchronize()
        time.sleep(REST_S)
        marks, end = [mark()], time.perf_counter() + seconds
        while time.perf_counter() < end:
            issue()
            marks.append(mark())
            if len(marks) > QUEUED:
                marks[-QUEUED].synchronize()
        marks[-1].synchronize()
        return [marks[0].elapsed_time(one) / 1e3 for one in marks[1:]]

    def _host(self, arena: Arena) -> torch.Tensor:
        import torch

        if not arena.locked:
            raise CannotMeasure("the host memory could not be page-locked")
        return torch.frombuffer(arena.buffer, dtype=torch.uint8)

    def _copies(self, to: torch.Tensor, from_: torch.Tensor, chunk: int) -> Callable[[], None]:
        """Copy PASS_BYTES (at least one chunk) in chunks; both sides wrap where they end."""

        def slots(side: torch.Tensor) -> list[torch.Tensor]:
            return list(side[: side.numel() // chunk * chunk].split(chunk))

        targets, sources = slots(to), slots(from_)
        count = max(1, PASS_BYTES // chunk)
        pairs = [(targets[i % len(targets)], sources[i % len(sources)]) for i in range(count)]

        def issue() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        return issue

    def link(self, arena: Arena, seconds: float) -> Iterator[Figure]:
        """H2D and D2H over chunk size, from one registered mapping; the first pass over it is a warm-up."""
        import torch

        host = self._host(arena)
        chunks = [chunk for chunk in CHUNKS if 2 * chunk <= host.numel()]
        device = torch.empty(max(chunks), dtype=torch.uint8, device=self.device)
        for start in range(0, host.numel() - max(chunks) + 1, max(chunks)):
            device.copy_(host[start : start + max(chunks)], non_blocking=True)
        torch.cuda.synchronize()
        for name, up in (("gpu.h2d", True), ("gpu.d2h", False)):
            rows = []
            for chunk in chunks:
                issue = self._copies(device, host, chunk) if up else self._copies(host, device, chunk)
                moved = max(1, PASS_BYTES // chunk) * chunk
                rows.append([chunk, round(moved / GB / self._median(issue, seconds / len(chunks)), 3)])
            yield Figure(name, rows, f"copies of each size from one registered mapping of {show_bytes(host.numel())}, CUDA events, median")

    def both_ways(self, arena: Arena, seconds: float) -> Iterator[Figure]:
        """H2D's rate while D2H copies run all along on another stream."""
        import torch

        host = self._host(arena)
        half = host.numel() // 2
        there, back = (torch.empty(BUSY_CHUNK, dtype=torch.uint8, device=self.device) for _ in range(2))
        up, down = self._copies(there, host[:half], BUSY_CHUNK), self._copies(host[half:], back, BUSY_CHUNK)
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        durations: list[float] = []
        end = time.perf_counter() + seconds
        while len(durations) < 3 or time.perf_counter() < end:
            with torch.cuda.stream(streams[1]):
                for _ in range(3):
                    down()
            durations.append(self._seconds(up, streams[0]))
            torch.cuda.synchronize()
        rate = max(1, PASS_BYTES // BUSY_CHUNK) * BUSY_CHUNK / GB / statistics.median(durations)
        yield Figure("gpu.h2d_with_d2h_gbps", rate, f"copies of {show_bytes(BUSY_CHUNK)} both ways on two streams, H2D's share, median")

    def issuing(self, arena: Arena, seconds: float) -> Iterator[Figure]:
        """Host seconds of one copy as the runtime issues them: by a thread of its own, two in flight. Another waits for the end of each and
        says so, and this one launches kernels. The copies are small, so that the link is idle between them."""
        import torch

        source = self._host(arena)[:SMALL_COPY]
        target, operand = torch.empty(SMALL_COPY, dtype=torch.uint8, device=self.device), torch.ones(1024, device=self.device)
        stream, took, over, retired = torch.cuda.Stream(), list[float](), threading.Event(), threading.Event()
        queued: deque[torch.cuda.Event | None] = deque()
        changed = threading.Condition()

        def copy() -> None:
            with torch.cuda.stream(stream):
                while not over.is_set() or len(took) < LEAST_COPIES:
                    begun = time.perf_counter()
                    with changed:
                        changed.wait_for(lambda: len(queued) < 2 or retired.is_set())
                    target.copy_(source, non_blocking=True)
                    event = torch.cuda.Event(enable_timing=True, blocking=True)
                    event.record(stream)
                    with changed:
                        queued.append(event)
                        changed.notify_all()
                    took.append(time.perf_counter() - begun)

        def retire() -> None:
            try:
                while (first := head()) is not None:
                    first.synchronize()
                    with changed:
                        queued.popleft()
                        changed.notify_all()
            finally:
                with changed:
                    retired.set()
                    changed.notify_all()

        def head() -> torch.cuda.Event | None:
            with changed:
                changed.wait_for(lambda: bool(queued))
                return queued[0]

        torch.cuda.synchronize()
        with ThreadPoolExecutor(2, "copies") as pool:
            copying, retiring = pool.submit(copy), pool.submit(retire)
            try:
                end = time.perf_counter() + seconds
                while time.perf_counter() < end and not copying.done() and not retiring.done():
                    for _ in range(LAUNCHED):
                        operand.add_(1.0)
                    torch.cuda.synchronize()
            finally:
                over.set()
                copying.exception()
                with changed:
                    queued.append(None)
                    changed.notify_all()
            for work in (copying, retiring):
                work.result()
        torch.cuda.synchronize()
        how = f"{len(took)} copies of {show_bytes(SMALL_COPY)} by a thread, two in flight"
        how += ", each waited for by another, while a third launches kernels, mean"
        yield Figure("gpu.copy_s", statistics.mean(took), how)

    def pageable(self, seconds: float) -> Iterator[Figure]:
        """H2D from ordinary memory."""
        import torch

        host = torch.ones(PASS_BYTES // 2, dtype=torch.uint8)
        device = torch.empty_like(host, device=self.device)
        took = self._median(lambda: device.copy_(host), seconds)
        how = f"copies of {show_bytes(host.numel())} from memory not page-locked, median"
        yield Figure("gpu.h2d_pageable_gbps", host.numel() / GB / took, how)

    def compute(self, seconds: float) -> Iterator[Figure]:
        """BF16 rate of products and of attention at prefill shapes, and weight bytes per second at decode shapes."""
        import torch
        from torch.nn.functional import linear, scaled_dot_product_attention

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=self.device)

        torch.backends.cuda.enable_cudnn_sdp(False)  # the runtime does without it
        with torch.inference_mode():
            tokens, weight = made(4096, 4096), made(14336, 4096)
            took = self._median(lambda: linear(tokens, weight), seconds, least=5)
            tflop, how = 2 * 4096 * 4096 * 14336 / 1e12, "F.linear, BF16 4096x4096 by 4096x14336"
            yield Figure("gpu.dense_tflops", tflop / took, f"{how}, median")
            runs = [self._rested(lambda: linear(tokens, weight), seconds) for _ in range(RESTS)]
            if burst := burst_of([statistics.median(each) for each in zip(*runs, strict=False)], took):
                yield Figure("gpu.burst_tflops", tflop / burst.each_s, f"{how}, behind {REST_S:g} s of rest, median of {RESTS}")
                yield Figure("gpu.burst_s", burst.seconds, "until they slowed down: one step by least squares")
            queries, keys = made(1, 32, LONG_PROMPT, 128), made(1, 8, LONG_PROMPT, 128)

            def attend() -> None:
                scaled_dot_product_attention(queries, keys, keys, is_causal=True, enable_gqa=True)

            took = self._median(attend, seconds)
            how = f"scaled_dot_product_attention, causal, {LONG_PROMPT} tokens, 32 query and 8 KV heads of 128, without cuDNN, median"
            yield Figure("gpu.attention_tflops", 2 * 32 * 128 * LONG_PROMPT**2 / 1e12 / took, how)
            rotated, token = [made(14336, 8192) for _ in range(3)], made(1, 8192)

            def decode() -> None:
                for _ in range(4):
                    for matrix in rotated:
                        linear(token, matrix)

            took = self._median(decode, seconds, least=5) / (4 * len(rotated))
            how = f"F.linear, 1 row, {len(rotated)} rotated BF16 14336x8192, median"
            yield Figure("gpu.memory_gbps", 14336 * 8192 * 2 / GB / took, how)

    def feeding(self, arena: Arena, seconds: float, going: Callable[[], bool]) -> tuple[float, float, float]:
        """H2D for ``seconds`` or as long as ``going()``, one copy at least, while the caller reads DRAM: GB/s, and when it began
        and ended by ``time.perf_counter``. Enough copies are queued that the link does not wait for this thread, which shares the
        interpreter with the readers."""
        import torch

        host = self._host(arena)
        sources = list(host[: host.numel() // BUSY_CHUNK * BUSY_CHUNK].split(BUSY_CHUNK))
        device = [torch.empty(BUSY_CHUNK, dtype=torch.uint8, device=self.device) for _ in range(2)]
        events: list[torch.cuda.Event] = []
        torch.cuda.synchronize()
        start = time.perf_counter()
        while not events or (time.perf_counter() < start + seconds and going()):
            at = len(events)
            device[at % 2].copy_(sources[at % len(sources)], non_blocking=True)
            events.append(torch.cuda.Event())
            events[-1].record()
            if at >= QUEUED:
                events[at - QUEUED].synchronize()
        torch.cuda.synchronize()
        end = time.perf_counter()
        return len(events) * BUSY_CHUNK / GB / (end - start), start, end

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()
