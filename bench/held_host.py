"""`penstock.runtime` as one of several hosts that are played on one machine: its reads and its sends are held back, its cores are some of
the machine's, it has a name of its own.

    HELD_READ_GBPS=0.5 HELD_SEND_GBPS=1.25 HELD_SEND_S=5e-5 HELD_CORES=0,1 HELD_NAME=left python bench/held_host.py run plan=plan.yaml

What is not set is not held. A rank is held to its part of its host's rates, as LOCAL_WORLD_SIZE has it.

    reads: a token bucket without a burst, over all that the readers get by os.preadv, from the drive or from the page cache
    sends: each of torch.distributed's isend begins later, by bytes / rate + latency, one after the other; hidden states, words and logits
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_SPINS_S = 2e-4
"""A sleep is late by about as much."""


class Bucket:
    """Nothing through it is ahead of ``gbps``, and each piece takes ``latency_s`` beside."""

    def __init__(self, gbps: float, latency_s: float = 0.0):
        self._gbps, self._latency_s = gbps, latency_s
        self._lock = threading.Lock()
        self._free = 0.0

    def through(self, nbytes: int) -> float:
        """When ``nbytes`` more are through, by ``time.perf_counter``."""
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + nbytes / self._gbps / 1e9
            return self._free + self._latency_s

    def wait(self, nbytes: int) -> None:
        """Return when ``nbytes`` are through, to the microsecond: the interpreter is held for the end of it."""
        until = self.through(nbytes)
        while (left := until - time.perf_counter()) > 0:
            if left > _SPINS_S:
                time.sleep(left - _SPINS_S)


def hold_reads(bucket: Bucket) -> None:
    """Before any of the runtime is imported: its readers take ``os.preadv`` then."""
    read = os.preadv

    def held(fd: int, buffers: Sequence[Any], offset: int, *flags: int) -> int:
        until = bucket.through(sum(memoryview(buffer).nbytes for buffer in buffers))
        got = read(fd, buffers, offset, *flags)
        time.sleep(max(0.0, until - time.perf_counter()))  # late by a little: others are in flight, and need the interpreter
        return got

    os.preadv = held  # type: ignore[assignment]


def hold_drive(gbps: float) -> None:
    """This process's reads, to so many GB/s."""
    hold_reads(Bucket(gbps))


def held_drive(profile: Mapping[str, Any], gbps: float) -> list[str]:
    """What `planner solve` is told of a probed drive whose reads are held to so many GB/s."""
    reads = [[block, depth, round(min(probed, gbps), 4)] for block, depth, probed in profile["ssd"]["read"]]
    return [f"hardware.ssd.read={json.dumps(reads)}", "hardware.ssd.long_gbps=0"]


def hold_sends(bucket: Bucket) -> None:
    """Everything that this process sends over torch.distributed."""
    import torch.distributed as dist

    send: Callable[..., Any] = dist.isend

    def held(tensor: Any, *where: Any, **how: Any) -> Any:
        bucket.wait(tensor.nbytes)
        return send(tensor, *where, **how)

    dist.isend = held  # type: ignore[assignment]


def main() -> None:
    """Hold, and be `runtime`."""
    given, each = os.environ.get, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cores := given("HELD_CORES"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if name := given("HELD_NAME"):
        socket.gethostname = lambda: name  # type: ignore[assignment]
    if gbps := given("HELD_READ_GBPS"):
        hold_reads(Bucket(float(gbps) / each))
    if gbps := given("HELD_SEND_GBPS"):
        hold_sends(Bucket(float(gbps) / each, float(given("HELD_SEND_S", "0"))))
    from penstock.runtime.cli import main as runtime

    sys.argv[0] = "runtime"
    runtime()


if __name__ == "__main__":
    main()
