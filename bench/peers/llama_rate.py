"""Bytes a second that llama.cpp's CPU decodes at, beside our own products and a plain read of the same process's memory.

    python bench/peers/llama_rate.py llama=DIR work=/dev/shm/penstock out=llama.json
        [model=llama8b] [layers=4] [formats=BF16,Q4_0] [threads=4,8,12,16] [new_tokens=32]

Writes a random GGUF file of a few layers for each format and removes it. A decode step reads all tensors but the embedding's table, of
which it looks up one row: `rate = bytes * tokens/s`. Its best over thread counts, `-lm none` and its default; flash attention on.

`llama` is the directory of `llama-bench`, built from llama.cpp's source (bench/llama_programs.py) for AVX-512 and AMX. It asks the
processor for AMX before it uses tiles, but needs AVX-512 with BF16 and VNNI. One static file, for this machine and others
(`-DOpenMP_gomp_LIBRARY=` names libgomp.a):

    cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON \\
        -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON \\
        -DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF \\
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DCMAKE_EXE_LINKER_FLAGS=-static
    cmake --build build --target llama-bench && strip build/bin/llama-bench

A row's result is our product at its best thread count, its limit the lower of llama.cpp's rate and the plain read.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.beside_rates import Rates, measure_rates  # noqa: E402
from bench.cases import Row, run_cases  # noqa: E402
from bench.coded_synth import GGUF_FILLS, config_of  # noqa: E402
from bench.gguf_synth import dense_gguf  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.llama_layers import LlamaLayers, Split  # noqa: E402
from bench.llama_programs import LlamaPrograms, Work  # noqa: E402
from bench.worker import Failed, Worker  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.common.host_memory import usable_cores  # noqa: E402

KEYS = ("llama", "work", "out", "model", "layers", "formats", "threads", "new_tokens")
HANG_S = 300.0
BUSY_S = 0.6


def ours(worker: Worker, format: str, threads: Sequence[int]) -> tuple[Rates, int]:
    """The best over ``threads``, and which that is. UserError where there is no product with ``format``."""
    found = [(worker(measure_rates, [format], count, BUSY_S), count) for count in threads]
    return max(found, key=lambda pair: pair[0].cpu_gbps[format])


def compared(
    worker: Worker, programs: LlamaPrograms, work: Path, format: str, config: dict, threads: Sequence[int], new_tokens: int
) -> Iterator[Row]:
    file, model = work / f"rate-{format.lower()}.gguf", dense_gguf(config, format, format)
    try:
        model.write(file)
        best = programs.bench(file, Split(0), Work(new=new_tokens), threads).best
    finally:
        file.unlink(missing_ok=True)
    read = LlamaLayers(model).read_bytes(Split(0))
    theirs = best.tokens_s * read / 1e9
    what = f"{best.threads} threads, -lm {best.mode}, {best.tokens_s:.1f} tok/s of {read / 1e9:.2f} GB"
    try:
        rates, count = ours(worker, format, threads)
    except (UserError, Failed) as error:
        yield Row(f"llama.cpp {format}, decode", f"{what}; {error}", theirs, theirs, "GB/s", 1.0, "", None, 0, 0)
        return
    mine, limit = rates.cpu_gbps[format], min(theirs, rates.read_gbps)
    yield Row(f"llama.cpp {format}, decode", what, theirs, rates.read_gbps, "GB/s", theirs / rates.read_gbps, "", None, 0, 0)
    yield Row(f"our {format} product", f"{count} threads, over both", mine, limit, "GB/s", mine / limit, ">= 0.9", None, 0, 0)


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
    except UserError as error:
        raise SystemExit(str(error)) from None
    formats = given.get("formats", "BF16,Q4_0").split(",")
    for format in formats:
        if format not in GGUF_FILLS:
            raise SystemExit(f"formats={format}: choose from {', '.join(GGUF_FILLS)}")
    programs = LlamaPrograms(Path(given.get("llama", ".")), card=False)
    cores = usable_cores()
    usual = sorted({max(1, cores * share // 4) for share in (1, 2, 3, 4)})
    threads = [int(n) for n in given["threads"].split(",")] if "threads" in given else usual
    work = Path(given.get("work", "bench-work")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    config = config_of(given.get("model", "llama8b"), int(given.get("layers", "4")))
    where = {"gpu": None, "cores": cores, "date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    with closing(Worker(HANG_S)) as worker:
        asked = {"config": config, "threads": threads, "new_tokens": int(given.get("new_tokens", "32"))}
        cases = {format: partial(compared, worker, programs, work, format, **asked) for format in formats}
        try:
            run_cases(cases, where, Path(given["out"]) if "out" in given else None)
        except UserError as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
