"""KV whose every row follows from the tokens before it, computed on a device whose streams run in any order."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.kv.batch.contiguous import Pair
from penstock.runtime.kv.disk.disk_pages import DiskReader
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.disk.page_writer import DiskWriter
from penstock.runtime.kv.pages.page_tiers import PageMemory
from penstock.runtime.kv.pages.prefix import Prefix
from penstock.runtime.kv.pages.prompt_pages import Tokens, pads_of
from penstock.runtime.memory.arena import Arena
from tests.runtime.fakes import FakeDevice, FakeEvent, FakeLane

LAYERS, HEADS, DIM, TOKENS = 3, 2, 32, 16
SHAPE = PageShape(bytes(range(16)), TOKENS, LAYERS, 2 * HEADS * TOKENS * DIM * 2)
SPOILT = 12345


def page_memory(page_bytes: int, dram: int, device: Any = None, bounce: int = 1, kept: int = 0) -> PageMemory:
    """Pages of the arena and of what a test takes for VRAM, which begin as garbage."""
    arena = Arena(dram * page_bytes)
    arena.tensor.fill_(77)
    if device is None:
        return PageMemory(arena.view, arena.tensor)
    vram = [torch.full((n, page_bytes), 77, dtype=torch.uint8) for n in (bounce, kept)]
    return PageMemory(arena.view, arena.tensor, device, *vram)


class AsyncDevice(FakeDevice):
    """A fake device that several threads wait for, and whose work is done by whoever waits. ``host_layers`` are not in its memory."""

    def __init__(self, choose: Callable[[Sequence[str]], str], host_layers: Sequence[torch.Tensor] = ()):
        super().__init__(choose)
        self._lock = threading.RLock()
        self._on_host = {held.untyped_storage().data_ptr() for held in host_layers}
        self.must_not_wait: int | None = None
        """Thread for which waiting is a mistake."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in self._on_host

    def lane(self) -> FakeLane:
        with self._lock:
            return super().lane()

    def host_waits(self, event: FakeEvent) -> None:
        while event.at is None:
            assert threading.get_ident() != self.must_not_wait, "the computing thread waited"
            self.step() or time.sleep(0)

    def step(self) -> bool:
        """Do one piece of any stream's work, unless there is none."""
        with self._lock:
            enabled = self.enabled()
            if enabled:
                self.advance(self._choose(enabled))
            return bool(enabled)

    def drain(self) -> None:
        while self.step():
            pass
        assert not any(self._queues.values()), "work that nothing can bring about"


@functools.cache
def row_of(tokens: tuple[int, ...]) -> torch.Tensor:
    """KV of the last of ``tokens``: int16 [layers, 2, heads, dim]."""
    seed = xxhash.xxh3_64_intdigest(repr(tokens).encode()) >> 1
    return torch.randint(-9999, 9999, (LAYERS, 2, HEADS, DIM), dtype=torch.int16, generator=torch.Generator().manual_seed(seed))


def kv_of(tokens: Sequence[int]) -> torch.Tensor:
    """int16 [layers, 2, heads, tokens, dim]"""
    return torch.stack([row_of(tuple(tokens[: i + 1])) for i in range(len(tokens))], 3)


@dataclass
class Served:
    """A prefix cache over KV buffers of the test's own, and a model that computes KV there and judges what it finds restored.

    ``layers`` of ``pairs`` in ``host_layers`` are worked on at once, the others on ``device`` in the order of its compute stream.
    """

    prefix: Prefix
    memory: PageMemory
    pairs: list[Pair]
    device: AsyncDevice | None = None
    host_layers: Sequence[int] = ()

    def batch(self, prompts: Tokens, answers: Tokens = (), finish: bool = True) -> int:
        """Restore ``prompts``, compute the rest and the ``answers``, keep everything -> the row that computing had to begin at. Like a run
        this computes before checks are over, and again from there on where that was too soon."""
        pairs = [tuple(held[: len(prompts)] for held in pair) for pair in self.pairs]
        pads = pads_of(prompts)
        sequences = [[*p, *a] for p, a in zip(prompts, answers or [[]] * len(prompts), strict=True)]
        self._work(lambda held, i, side: held.fill_(SPOILT), pairs)
        start = self.prefix.restore(prompts, pairs)
        wrong: list[int] = []

        def judge(held: torch.Tensor, i: int, side: int) -> None:
            """Note the rows that are not as they should be when computing begins."""
            for b, (prompt, pad) in enumerate(zip(prompts, pads, strict=True)):
                assert not held[b, :, : min(pad, start)].any(), "padding is not zeros"
                restored = prompt[: max(0, start - pad)]
                if restored:
                    differ = (held[b, :, pad:start] != kv_of(restored)[i, side]).any(-1).any(0)
                    wrong.extend((pad + differ.nonzero().flatten()).tolist())

        def compute(first_row: int, held: torch.Tensor, i: int, side: int) -> None:
            for b, (tokens, pad) in enumerate(zip(sequences, pads, strict=True)):
                first = max(0, first_row - pad)
                held[b, :, pad + first : pad + len(tokens)] = kv_of(tokens)[i, side][:, first:]

        self._work(judge, pairs)
        self._work(partial(compute, start), pairs)
        sound = self.prefix.confirm()
        if sound < start:
            self._work(partial(compute, sound), pairs)

        def conclude(held: torch.Tensor, i: int, side: int) -> None:
            assert all(row >= sound for row in wrong), f"rows {wrong} are wrong, computing began at {sound}"

        self._work(conclude, pairs)
        self.prefix.keep(prompts)
        with self.no_waiting():
            self.prefix.advance(pairs)
        if self.device:
            self.device.step()
        with self.no_waiting():
            self.prefix.advance(pairs)
        self.prefix.keep(sequences)
        if finish:
            self.prefix.finish(pairs)
        return sound

    def _work(self, on: Callable[[torch.Tensor, int, int], object], pairs: Sequence[Pair]) -> None:
        def run(layers: Iterable[int]) -> None:
            for i in layers:
                for side, held in enumerate(pairs[i]):
                    on(held, i, side)

        run(self.host_layers)
        there = [i for i in range(LAYERS) if i not in self.host_layers]
        if self.device:
            self.device.launch(lambda: run(there))
        else:
            run(there)

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Inside, the device must not be waited for."""
        if self.device:
            self.device.must_not_wait = threading.get_ident()
        yield
        if self.device:
            self.device.must_not_wait = None


@contextmanager
def served(
    plan: Plan,
    directory: Path | None = None,
    choose: Callable[[Sequence[str]], str] | None = None,
    host_layers: Sequence[int] = (),
    dram: int = 32,
    bounce: int = 1,
    kept: int = 0,
    batch: int = 3,
    capacity: int = 160,
    read_only: bool = False,
    **options: Any,
) -> Iterator[Served]:
    """Over ``dram`` pages of DRAM; with ``choose`` on a device of ``bounce`` and ``kept`` pages, without it on the CPU. A ``directory`` is
    the disk, with ``read_only`` one that others write."""
    card = torch.zeros(LAYERS, 2, batch, HEADS, capacity, DIM, dtype=torch.int16)
    apart = {i: torch.zeros(2, capacity, batch, HEADS, DIM, dtype=torch.int16).permute(0, 2, 3, 1, 4) for i in host_layers}
    pairs = [tuple(apart[i]) if i in apart else tuple(card[i]) for i in range(LAYERS)]
    device = AsyncDevice(choose, list(apart.values())) if choose else None
    memory = page_memory(SHAPE.payload_bytes, dram, device, bounce, kept)
    options = {"read_gbps": 1e9, "readers": 3} | options
    with contextlib.ExitStack() as stack:
        disk = None
        if directory is not None:
            lines: list[str] = []
            if read_only:
                disk = DiskReader(directory, SHAPE, warn=lines.append)
            else:
                disk = DiskWriter(directory, SHAPE, 64 << 20, 1 << 20, queue_pages=dram, warn=lines.append)
            stack.enter_context(disk)
        prefix = stack.enter_context(contextlib.closing(Prefix(SHAPE, plan, memory, disk, **options)))
        yield Served(prefix, memory, pairs, device, host_layers if device else ())
        if device:
            device.drain()
