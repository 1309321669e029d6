"""KV whose every row follows from the tokens before it, computed on a device whose streams run in any order."""

from __future__ import annotations

import contextlib
import functools
import os
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
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.batch.page_pool import PagePool
from penstock.runtime.kv.disk.disk_pages import DiskReader
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.disk.page_writer import DiskWriter
from penstock.runtime.kv.disk.segments import Transfer
from penstock.runtime.kv.pages.page_tiers import PageMemory
from penstock.runtime.kv.pages.prefix import Prefix
from penstock.runtime.kv.pages.prompt_pages import Tokens
from penstock.runtime.memory.arena import Arena
from tests.runtime.fakes import FakeDevice, FakeEvent, FakeLane

LAYERS, HEADS, DIM, TOKENS = 3, 2, 32, 16
SHAPE = PageShape(bytes(range(16)), TOKENS, LAYERS, 2 * HEADS * TOKENS * DIM * 2)
SPOILT = 12345


def page_memory(
    shape: PageShape,
    slots: int,
    dram: int,
    device: Any = None,
    bounce: int = 1,
    host_layers: Sequence[int] = (),
) -> PageMemory:
    """A pool, and pages of the arena and of what a test takes for VRAM, all of which begin as garbage."""
    arena = Arena(dram * shape.payload_bytes)
    arena.tensor.fill_(77)
    card = torch.full((shape.layers, slots * shape.layer_bytes), 77, dtype=torch.uint8)
    buffers = {i: torch.full_like(card[i], 78) if i in host_layers else card[i] for i in range(shape.layers)}
    pool = PagePool(slots, shape.page_tokens)
    if device is None:
        return PageMemory(pool, buffers, arena.view, arena.tensor)
    return PageMemory(pool, buffers, arena.view, arena.tensor, device, torch.full((bounce, shape.payload_bytes), 77, dtype=torch.uint8))


class AsyncDevice(FakeDevice):
    """A fake device that several threads wait for, and whose work is done by whoever waits."""

    def __init__(self, choose: Callable[[Sequence[str]], str]):
        super().__init__(choose)
        self._lock = threading.RLock()
        self._on_host: set[int] = set()
        self.must_not_wait: int | None = None
        """Thread for which waiting is a mistake."""

    def leave_out(self, host_layers: Sequence[torch.Tensor]) -> None:
        """These are not in its memory."""
        self._on_host = {held.untyped_storage().data_ptr() for held in host_layers}

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
    """KV of the last of ``tokens``: int16 [layers, k and v of all heads]."""
    seed = xxhash.xxh3_64_intdigest(repr(tokens).encode()) >> 1
    return torch.randint(-9999, 9999, (LAYERS, 2 * HEADS * DIM), dtype=torch.int16, generator=torch.Generator().manual_seed(seed))


def kv_of(tokens: Sequence[int]) -> torch.Tensor:
    """int16 [layers, tokens, k and v of all heads]"""
    return torch.stack([row_of(tuple(tokens[: i + 1])) for i in range(len(tokens))], 1)


@dataclass
class Served:
    """A prefix cache over a pool of the test's own, and a model that computes KV there and judges what it finds restored.

    Layers in ``host_layers`` are worked on at once, the others on ``device`` in the order of its compute stream.
    """

    prefix: Prefix
    memory: PageMemory
    device: AsyncDevice | None = None
    host_layers: Sequence[int] = ()

    def batch(self, prompts: Tokens, answers: Tokens = (), finish: bool = True) -> list[int]:
        """Restore ``prompts``, compute the rest and the ``answers``, keep everything -> the tokens of each that were not computed. Like
        a run this computes before checks are over, and again from there on where that was too soon."""
        pool = self.memory.pool
        sequences = [KvSequence.of(i, prompt) for i, prompt in enumerate(prompts)]
        whole = [[*p, *a] for p, a in zip(prompts, answers or [[]] * len(prompts), strict=True)]
        self.prefix.restore(sequences)
        given = [s.cached for s in sequences]
        wrong: list[tuple[int, int]] = []
        for tokens, sequence in zip(whole, sequences, strict=True):
            held = len(sequence.pages)
            sequence.hold(pool, len(tokens))
            self._work(partial(_write, pages=sequence.pages[held:], first=0, states=None))

        def judge(paged: torch.Tensor, i: int, number: int, pages: list[int], tokens: int) -> None:
            """Note the tokens that are not as they should be when computing begins."""
            if tokens:
                differ = (paged[pages].flatten(0, 1)[:tokens] != kv_of(prompts[number][:tokens])[i]).any(-1)
                wrong.extend((number, t) for t in differ.nonzero().flatten().tolist())

        for sequence, tokens in zip(sequences, given, strict=True):
            self._work(partial(judge, number=sequence.number, pages=list(sequence.pages), tokens=tokens))
        self._compute(whole, sequences)
        self.prefix.confirm()
        for tokens, sequence in zip(whole, sequences, strict=True):
            sequence.hold(pool, len(tokens))
        self._compute(whole, [s for s, tokens in zip(sequences, given, strict=True) if s.cached < tokens])
        sound = [s.cached for s in sequences]

        def conclude(paged: torch.Tensor, i: int) -> None:
            assert all(t >= sound[number] for number, t in wrong), f"{wrong} are wrong, computing began at {sound}"

        self._work(conclude)
        for sequence in sequences:
            sequence.cached = len(sequence.tokens)
        self.prefix.keep(sequences)
        with self.no_waiting():
            self.prefix.advance()
        if self.device:
            self.device.step()
        with self.no_waiting():
            self.prefix.advance()
        for tokens, sequence in zip(whole, sequences, strict=True):
            sequence.tokens, sequence.cached = tokens, len(tokens)
        self.prefix.keep(sequences)
        if finish:
            self.prefix.finish()
        for sequence in sequences:
            sequence.release(pool)
        return sound

    def _compute(self, whole: Tokens, sequences: Iterable[KvSequence]) -> None:
        for sequence in sequences:
            states = kv_of(whole[sequence.number])
            self._work(partial(_write, pages=list(sequence.pages), first=sequence.cached, states=states))

    def _work(self, on: Callable[[torch.Tensor, int], object]) -> None:
        """``on`` gets each layer's pool, int16 [slots, tokens, k and v of all heads], and the layer."""

        def run(layers: Iterable[int]) -> None:
            for i in layers:
                on(self.memory.buffers[i].view(torch.int16).view(-1, TOKENS, 2 * HEADS * DIM), i)

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


def _write(paged: torch.Tensor, i: int, pages: list[int], first: int, states: torch.Tensor | None) -> None:
    """``states`` of a sequence's tokens from ``first`` on in its ``pages``; spoil these without states."""
    if states is None:
        paged[pages] = SPOILT
        return
    for t in range(first, states.shape[1]):
        paged[pages[t // TOKENS], t % TOKENS] = states[i, t]


@contextmanager
def served(
    plan: Plan,
    directory: Path | None = None,
    choose: Callable[[Sequence[str]], str] | None = None,
    host_layers: Sequence[int] = (),
    dram: int = 32,
    bounce: int = 1,
    slots: int = 30,
    read_only: bool = False,
    pwritev: Transfer = os.pwritev,
    **options: Any,
) -> Iterator[Served]:
    """Over a pool of ``slots`` pages and ``dram`` pages of DRAM; with ``choose`` on a device with ``bounce`` pages, without it on the
    CPU. A ``directory`` is the disk, with ``read_only`` one that others write."""
    device = AsyncDevice(choose) if choose else None
    memory = page_memory(SHAPE, slots, dram, device, bounce, host_layers if device else ())
    if device:
        device.leave_out([memory.buffers[i] for i in host_layers])
    options = {"read_gbps": 1e9, "readers": 3} | options
    with contextlib.ExitStack() as stack:
        disk = None
        if directory is not None:
            lines: list[str] = []
            if read_only:
                disk = DiskReader(directory, SHAPE, warn=lines.append)
            else:
                disk = DiskWriter(directory, SHAPE, 64 << 20, 1 << 20, queue_pages=dram, warn=lines.append, pwritev=pwritev)
            stack.enter_context(disk)
        prefix = stack.enter_context(contextlib.closing(Prefix(SHAPE, plan, memory, disk, **options)))
        yield Served(prefix, memory, device, host_layers if device else ())
        if device:
            device.drain()
    assert memory.pool.free == slots, "a page of the pool was held by nobody that lives"
