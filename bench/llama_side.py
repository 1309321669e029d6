"""llama.cpp over one file within a budget of VRAM: as many layers as fit, then the best of its thread counts and ways of loading."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.gguf_synth import GgufModel
from bench.llama_layers import LlamaLayers, Split
from bench.llama_programs import MODES, LlamaPrograms, Work

PREFILL, NEW = 2048, 24
STEP_BATCH, ROWS_BATCH = 16, 512
"""Tokens of a pass at most: below 32 llama.cpp keeps no scratch for weights that a long pass would copy, so that more layers fit."""
OFFLOADED = 32
CONTEXT_BYTES = 600 << 20
"""Of CUDA, guessed: a trial measures it."""
KV_BYTES = 2
"""F16."""


@dataclass(frozen=True)
class Best:
    """The fastest of what was tried, its split, and the most VRAM that was measured."""

    tokens_s: float
    threads: int
    mode: str
    split: Split
    vram_bytes: int

    def __str__(self) -> str:
        vram = f", VRAM {self.vram_bytes / 1e9:.2f} GB" if self.vram_bytes else ""
        return f"{self.split}, {self.threads} threads, -lm {self.mode}{vram}"


Tried = tuple[dict[int, Best], int]
"""Batch size, or what else was tried -> the best; the most VRAM."""


class LlamaSide:
    """``budget_bytes``: of VRAM; None without a card, where nothing is in it."""

    def __init__(self, programs: LlamaPrograms, model: GgufModel, file: Path, budget_bytes: int | None, threads: Sequence[int]):
        self._programs, self.model, self.file = programs, model, file
        self._budget, self._threads = budget_bytes, threads

    @contextmanager
    def written(self) -> Iterator[None]:
        """The file is there within the block."""
        begun = time.perf_counter()
        try:
            self.model.write(self.file)
            print(f"    {self.file.name}: {self.model.nbytes / 1e9:.2f} GB in {time.perf_counter() - begun:.1f} s", flush=True)
            yield
        finally:
            self.file.unlink(missing_ok=True)

    def layers(self, tokens: int) -> LlamaLayers:
        return LlamaLayers(self.model, self.model.kv_width * KV_BYTES * tokens)

    def step(self, new: int = NEW) -> Best:
        """Tokens a second of one sequence: all thread counts, both ways of loading."""
        return self._bench(Work(new=new, batch=STEP_BATCH), Work(new=1, batch=STEP_BATCH, repeats=1, warm=False), self._threads)

    def prefill(self, threads: int, tokens: int = PREFILL) -> Best:
        """A prompt in one pass, in both ways of loading."""
        return self._bench(Work(prompt=tokens, batch=tokens), Work(prompt=tokens, batch=tokens, repeats=1, warm=False), [threads])

    def batches(self, sizes: Sequence[int], prompt: int, new: int) -> dict[int, Best]:
        """Steps of many sequences: all thread counts in one way of loading, the best of them in the other."""
        room = max(sizes) * (prompt + new)

        def run(split: Split, counts: Sequence[int], of: Sequence[int], tokens: int, mode: str) -> Tried:
            found: dict[int, Best] = {}
            most = 0
            for count in counts:
                rates, vram = self._programs.batched(self.file, split, of, prompt, tokens, room, ROWS_BATCH, count, mode)
                most = max(most, vram)
                for size, rate in rates.items():
                    if size not in found or rate > found[size].tokens_s:
                        found[size] = Best(rate, count, mode, split, vram)
            return found, most

        def both(split: Split) -> Tried:
            first, vram = run(split, self._threads, sizes, new, MODES[0])
            second, more = run(split, sorted({one.threads for one in first.values()}), sizes, new, MODES[1])
            return {size: max((first[size], second[size]), key=lambda one: one.tokens_s) for size in sizes}, max(vram, more)

        trial = partial(run, counts=self._threads[-1:], of=[max(sizes)], tokens=1, mode=MODES[1])
        return self.within(self.layers(room), ROWS_BATCH, trial, both)

    def _bench(self, work: Work, trial: Work, threads: Sequence[int]) -> Best:
        def run(split: Split, work: Work, threads: Sequence[int], modes: Sequence[str]) -> Tried:
            ran = self._programs.bench(self.file, split, work, threads, modes)
            best = ran.best
            return {1: Best(best.tokens_s, best.threads, best.mode, split, ran.vram_bytes)}, ran.vram_bytes

        once = partial(run, work=trial, threads=threads[-1:], modes=MODES[1:])
        return self.within(self.layers(work.prompt + work.new), work.batch, once, partial(run, work=work, threads=threads, modes=MODES))[1]

    def within(self, layers: LlamaLayers, batch: int, trial: Callable[[Split], Tried], run: Callable[[Split], Tried]) -> dict[int, Best]:
        """``run`` with the most in VRAM that the budget holds: by a guess, by what a ``trial`` measured, by a layer less where it was
        still too much."""
        if self._budget is None:
            return run(Split(0))[0]
        guess = CONTEXT_BYTES + batch * self.model.vocab * 4 + (self.model.largest_bytes if batch >= OFFLOADED else 0)
        split = layers.fit(self._budget, guess)
        took = trial(split)[1]
        if not took:
            raise SystemExit(f"{split}: llama.cpp took no VRAM, so it found no card; its own words say why: llama-bench --list-devices")
        beside = took - layers.vram_bytes(split)
        print(f"    {split}: {beside / 1e9:.2f} GB of VRAM beside weights and KV, guessed {guess / 1e9:.2f}", flush=True)
        split = layers.fit(self._budget, beside)
        while True:
            found, vram = run(split)
            less = layers.less(split) if vram > self._budget else None
            if less is None:
                return found
            print(f"    {split}: {vram / 1e9:.2f} GB of VRAM, more than {self._budget / 1e9:.2f}; now {less}", flush=True)
            split = less
