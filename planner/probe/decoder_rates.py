"""How fast the runtime decodes each format: timed by a process of its own, since the planner knows the runtime as a program alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from penstock.planner.probe.findings import CannotMeasure, Figure

DECODERS = ("cpu.decode", "gpu.decode", "gpu.products")
PATIENCE_S = 40.0
"""A process that takes longer is ended: imports, and the slowest decoders three times."""


def measure_decoders(seconds: float, threads: int, gpu: int | None) -> Iterator[Figure]:
    """Rates by format, within about ``seconds`` for each device beside what importing torch takes."""
    words = [f"seconds={seconds}", *([f"threads={threads}"] if threads else []), *([] if gpu is None else [f"gpu={gpu}"])]
    command = [sys.executable, "-m", "penstock.runtime.tools.decoder_times", *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise CannotMeasure(f"timing the decoders took more than {PATIENCE_S:g} s") from error
    if done.returncode:
        raise CannotMeasure(f"timing the decoders failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1][:200]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    how = "each format's matrices of 4096 columns, three in turn, median"
    yield Figure("cpu.decode", told["cpu"]["decode"], f"1e9 elements/s decoded into memory, {how}")
    if gpu is not None and "cuda" in told:
        yield Figure("gpu.decode", told["cuda"]["decode"], f"1e9 elements/s decoded into memory, {how}")
        yield Figure("gpu.products", told["cuda"]["products"], f"GB/s of stored bytes, products of one row, {how}")
