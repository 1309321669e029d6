"""llama.cpp's programs: llama-bench and llama-batched-bench run over a file, what they say, and the VRAM that they took.

They are built from llama.cpp's source, as the source distribution of `llama-cpp-python` has it in vendor/llama.cpp; `90` is Hopper:

    cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90 \\
        -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON \\
        -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON -DLLAMA_OPENSSL=OFF \\
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    cmake --build build --target llama-bench llama-batched-bench llama-server llama-quantize

Their libraries of CUDA are looked for where pip's packages and the toolkit put them, so that torch's serve.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.llama_layers import Split
from bench.vram_used import Card, VramUsed
from penstock.planner.common.errors import UserError

MODES = ("none", "auto")
"""Ways of loading: copied into memory of its own, and its default."""
HANG_S = 300.0
TOOLKIT = Path("/usr/local/cuda/lib64")


@dataclass(frozen=True)
class Told:
    """Of one test of llama-bench."""

    tokens_s: float
    threads: int
    mode: str
    prompt: int = 0
    new: int = 0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Told:
        return cls(row["avg_ts"], row["n_threads"], row["load_mode"], row["n_prompt"], row["n_gen"])

    def __str__(self) -> str:
        what = f"prefill {self.prompt}" if self.prompt else "step"
        return f"{what}: {self.tokens_s:.4g} tok/s, {self.threads} threads, -lm {self.mode}"


@dataclass(frozen=True)
class Ran:
    """One process: what it said, and the most VRAM that it took, 0 without a card."""

    told: Sequence[Told]
    vram_bytes: int

    @property
    def best(self) -> Told:
        return max(self.told, key=lambda one: one.tokens_s)


@dataclass(frozen=True)
class Work:
    """What llama-bench does at each number of threads and way of loading: a prompt or new tokens."""

    prompt: int = 0
    new: int = 0
    batch: int = 2048
    """Tokens of a pass at most."""
    repeats: int = 2
    warm: bool = True

    @property
    def flags(self) -> Sequence[str]:
        sizes = ("-b", str(self.batch), "-ub", str(self.batch), "-fa", "1", "-r", str(self.repeats))
        return ("-p", str(self.prompt), "-n", str(self.new), *sizes, *(() if self.warm else ("--no-warmup",)))


class LlamaPrograms:
    """Programs in ``folder`` or its ``bin``; ``card``: whether VRAM is measured."""

    def __init__(self, folder: Path, card: bool):
        self._folder = folder.expanduser().resolve()
        self._card = Card() if card else None
        self._first = self._card.used_bytes() if self._card else 0

    def program(self, name: str) -> Path:
        """UserError where it is not there."""
        for path in (self._folder / "bin" / name, self._folder / name):
            if os.access(path, os.X_OK):
                return path
        raise UserError(f"llama={self._folder}: has no program {name}; build llama.cpp's, or give the directory that has them")

    def used(self) -> VramUsed:
        """By what begins within the block."""
        return VramUsed(self._card)

    def used_since(self) -> VramUsed:
        """By all that began since these programs were looked for: a process of ours keeps its context."""
        return VramUsed(self._card, self._first)

    def bench(self, file: Path, split: Split, work: Work, threads: Sequence[int], modes: Sequence[str] = MODES) -> Ran:
        """llama-bench, a line for each test as it is known. SystemExit with its last line where it fails."""
        counts = ",".join(map(str, threads))
        flags = [*split.flags, *work.flags, "-t", counts, "-lm", ",".join(modes), "-o", "jsonl"]
        told = []
        with self.used() as used:
            for row in self._rows("llama-bench", file, flags):
                told.append(Told.of(row))
                print(f"    llama.cpp {split}, {told[-1]}", flush=True)
        return Ran(told, used.most_bytes)

    def batched(
        self, file: Path, split: Split, sizes: Sequence[int], prompt: int, new: int, room: int, batch: int, threads: int, mode: str
    ) -> tuple[dict[int, float], int]:
        """llama-batched-bench: batch size -> new tokens a second of all sequences; and the most VRAM. ``room``: tokens of its context;
        ``batch``: of a pass at most."""
        counts = ["-npp", str(prompt), "-ntg", str(new), "-npl", ",".join(map(str, sizes)), "-c", str(room)]
        passes = ["-b", str(max(batch, *sizes)), "-ub", str(batch), "-fa", "on", "-t", str(threads)]
        flags = [*split.flags, *counts, *passes, "-lm", mode, "--output-format", "jsonl"]
        found = {}
        with self.used() as used:
            for row in self._rows("llama-batched-bench", file, flags):
                found[row["pl"]] = float(row["speed_tg"])
                print(f"    llama.cpp {split}, batch {row['pl']}: {found[row['pl']]:.4g} tok/s, {threads} threads, -lm {mode}", flush=True)
        if missing := [size for size in sizes if size not in found]:
            raise SystemExit(f"llama-batched-bench: said nothing of batch {missing[0]}; its context of {room} tokens is too small")
        return found, used.most_bytes

    def _rows(self, name: str, file: Path, flags: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Its lines of JSON. SystemExit with its last line where it fails."""
        program = self.program(name)
        command = [str(program), "-m", str(file), *flags]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(program)
            )
            watch = threading.Timer(HANG_S, process.kill)
            watch.start()
            try:
                assert process.stdout is not None
                yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
                process.wait()
            finally:
                watch.cancel()
                process.kill()
                process.wait()
            if process.returncode:
                log.seek(0)
                last = (log.read().strip().splitlines() or ["no word"])[-1]
                raise SystemExit(f"{name}: status {process.returncode}: {last}; it was {' '.join(command)}")


def environment(program: Path) -> dict[str, str]:
    """Of this process, with the libraries of CUDA that pip or the toolkit brought, and what lies beside ``program``, to be
    found behind those that it names."""
    nvidia = importlib.util.find_spec("nvidia")
    places = (nvidia.submodule_search_locations or []) if nvidia else []
    folders = [str(path) for place in places for path in sorted(Path(place).glob("*/lib"))]
    known = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join([*([known] if known else []), *folders, str(TOOLKIT), str(program.parent)])}
