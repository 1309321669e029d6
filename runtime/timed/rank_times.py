"""What the links of several cards carry alone and at once, and what a hop between two of them takes: a process for each card, as runs have
them. Prints one JSON document. ``devices=0,1 seconds=0.5``; ``devices=cpu,cpu`` plays cards on a CPU.

All processes together take :func:`sampled_bytes` of page-locked memory, each 1 GiB at least, or just ``read_gib``. Each takes 256 MiB of
its card.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist

from penstock.planner.common.host_memory import sampled_bytes
from penstock.planner.common.measures import GB, align_up
from penstock.runtime.company.starting import CARDS
from penstock.runtime.hops.hops import Hops
from penstock.runtime.memory.arena import Arena
from penstock.runtime.memory.device import CudaDevice
from penstock.runtime.timed.recorded_hops import recorded_hop_s

PATIENCE_S = 60
"""For a process that does not come."""
LOOK_S = 0.05
"""From one look after the others to the next one."""
HOP_BYTES, PROMPT_BYTES = 16 * 2**10, 64 * 2**20
"""Hidden states of a token, and of a prompt."""
LEAST_HOPS, PROMPTS = 50, 4
ROUNDS = 3
"""Of all links at once: four H200s were probed at 149 GB/s once, where the same host's ranks had 165 to 180."""
CHUNK = 64 * 2**20
LEAST_READ = 16 * CHUNK
QUEUED = 4
"""Copies in flight."""


class Card(Protocol):
    """One card, with its link and its way to others."""

    free_bytes: int
    """Of its memory, beside this process's context."""
    read_bytes: int
    """Of host memory, that its copies come from."""

    def meet(self, meeting: Meeting) -> dict[str, Any]:
        """Make its ways to the others, as a run does: ``by`` what hops go, and how many ``vram_bytes`` they take."""

    def copied_gbps(self, seconds: float) -> float:
        """What its link carries to it for so long."""

    def busy(self) -> Any:
        """A context in which its link carries all the time."""

    def send(self, nbytes: int, to: int) -> None:
        """So many bytes to the card of rank ``to``, waited for. Between the first two ranks alone."""

    def receive(self, nbytes: int, sender: int) -> None:
        """So many bytes from the card of rank ``sender``, waited for."""

    def recorded_hop_s(self, meeting: Meeting, nbytes: int) -> float:
        """Seconds of a hop between the first two ranks inside a recorded step; 0.0 where steps are not recorded."""


class Meeting(Protocol):
    """All ranks."""

    rank: int
    count: int

    def gathered(self, value: float) -> list[float]:
        """``value`` of every rank, once all have come."""

    def told(self, words: Any) -> Any:
        """What rank 0 has for ``words``."""


def measure(meeting: Meeting, card: Card, seconds: float) -> dict[str, Any]:
    """What all ranks find together. Each measurement takes ``seconds``; so many as there are ranks and a few more."""
    rank, count = meeting.rank, meeting.count
    free = meeting.gathered(card.free_bytes)
    card.copied_gbps(seconds / 4)  # the first pass over page-locked memory is slower
    alone = [meeting.gathered(card.copied_gbps(seconds) if rank == one else 0.0)[one] for one in range(count)]
    together = []
    for cards in sorted({*(2**n for n in range(1, count.bit_length()) if 2**n <= count), count}):
        rounds = []
        for _ in range(ROUNDS):
            meeting.gathered(0.0)
            rounds.append(sum(meeting.gathered(card.copied_gbps(seconds) if rank < cards else 0.0)))
        together.append([cards, median(rounds)])
    meeting.gathered(0.0)
    hops = card.meet(meeting)
    with card.busy():
        hop_s = _hop_s(meeting, card, HOP_BYTES, LEAST_HOPS)
        word_hop_s = meeting.gathered(card.recorded_hop_s(meeting, HOP_BYTES))[0]
    prompt_s = _hop_s(meeting, card, PROMPT_BYTES, PROMPTS)
    return {
        "alone": alone,
        "together": together,
        "hop_s": hop_s,
        "word_hop_s": word_hop_s,
        "p2p_gbps": PROMPT_BYTES / GB / prompt_s,
        "free_bytes": [round(one) for one in free],
        "read_bytes": card.read_bytes,
        "hops": hops,
    }


def _hop_s(meeting: Meeting, card: Card, nbytes: int, times: int) -> float:
    """Half of the median of there and back between the first two ranks; the others wait."""
    took = []
    if meeting.rank < 2:
        for _ in range(1 + times):
            begun = time.perf_counter()
            for sender in (0, 1):
                card.send(nbytes, 1 - sender) if meeting.rank == sender else card.receive(nbytes, sender)
            took.append((time.perf_counter() - begun) / 2)
    return meeting.gathered(median(took[1:]) if took else 0.0)[0]  # the first one connects both


class TorchMeeting:
    """Of ``count`` processes that meet at ``address``, as ``init_process_group`` takes it."""

    def __init__(self, rank: int, count: int, address: str):
        self.rank, self.count = rank, count
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=count, timeout=timedelta(seconds=PATIENCE_S))

    def gathered(self, value: float) -> list[float]:
        found = [torch.zeros(1, dtype=torch.float64) for _ in range(self.count)]
        dist.all_gather(found, torch.tensor([value], dtype=torch.float64))
        return [float(one) for one in found]

    def told(self, words: Any) -> Any:
        told = [words]
        dist.broadcast_object_list(told, 0, device=torch.device("cpu"))
        return told[0]


class TorchCard:
    """Card ``device`` of this host, one of ``count``; on ``cpu`` copies go within memory."""

    def __init__(self, device: torch.device, count: int, read_bytes: int = 0):
        self.device, self.cuda = device, device.type == "cuda"
        if self.cuda:
            torch.cuda.set_device(device)
        self.free_bytes = torch.cuda.mem_get_info(device)[0] if self.cuda else 0
        sampled = max(LEAST_READ, align_up(sampled_bytes() // count, CHUNK)) if self.cuda else 2 * CHUNK
        self.read_bytes = read_bytes or sampled
        self._arena = Arena(self.read_bytes)  # in large pages, as a run's: several links read those faster
        self._arena.occupy(CudaDevice(device.index) if self.cuda else None)
        if self._arena.refused:
            raise RuntimeError(f"{self._arena.nbytes} bytes are not page-locked: {self._arena.refused}")
        self._sources = self._arena.tensor.split(CHUNK)
        self._targets = torch.empty(2 * CHUNK, dtype=torch.uint8, device=device).split(CHUNK)
        self._stream = torch.cuda.Stream() if self.cuda else None
        self._hops: Hops | None = None

    def meet(self, meeting: Meeting) -> dict[str, Any]:
        ways = sorted({(rank, (rank + 1) % meeting.count) for rank in range(meeting.count)} | {(1, 0)})
        free = torch.cuda.mem_get_info(self.device)[0] if self.cuda else 0
        self._hops = Hops(meeting.rank, ways, self.device, dist.new_group(backend="gloo"))
        taken = free - torch.cuda.mem_get_info(self.device)[0] if self.cuda else 0
        return {"by": self._hops.by, "vram_bytes": taken}

    def leave(self) -> None:
        """Give the ways to the others back, all at the same time."""
        if self._hops is not None:
            self._hops.close()

    def copied_gbps(self, seconds: float) -> float:
        begun = time.perf_counter()
        count = self._copy_while(lambda: time.perf_counter() < begun + seconds)
        return count * CHUNK / GB / (time.perf_counter() - begun)

    @contextmanager
    def busy(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._copy_while, args=(lambda: not over.is_set(),), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def send(self, nbytes: int, to: int) -> None:
        assert self._hops is not None, "meet() comes first"
        self._hops.behind(to).send(torch.zeros(nbytes, dtype=torch.uint8, device=self.device))
        self._hops.settle()
        self._settle()

    def receive(self, nbytes: int, sender: int) -> None:
        assert self._hops is not None, "meet() comes first"
        self._hops.before(sender).receive(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        self._settle()

    def recorded_hop_s(self, meeting: Meeting, nbytes: int) -> float:
        return recorded_hop_s(meeting, self.device, nbytes, LEAST_HOPS) if self.cuda else 0.0

    def _settle(self) -> None:
        if self.cuda:
            torch.cuda.current_stream().synchronize()

    def _copy_while(self, going: Callable[[], bool]) -> int:
        """Copies of a chunk, one at least; returns how many, when all are over."""
        events: list[torch.cuda.Event] = []
        at = 0
        while at == 0 or going():
            source, target = self._sources[at % len(self._sources)], self._targets[at % 2]
            if self._stream is None:
                target.copy_(source)
            else:
                with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                    target.copy_(source, non_blocking=True)
                    events.append(torch.cuda.Event(blocking=True))
                    events[-1].record()
                if at >= QUEUED:
                    events[at - QUEUED].synchronize()
            at += 1
        if self._stream is not None:
            self._stream.synchronize()
        return at


def _timed(devices: Sequence[str], rank: int, address: str, seconds: float, read_bytes: int) -> dict[str, Any]:
    name = devices[rank]
    device = torch.device("cpu") if name == "cpu" else torch.device("cuda", int(name))
    card = TorchCard(device, len(devices), read_bytes)
    try:
        found = measure(TorchMeeting(rank, len(devices), address), card, seconds)
        card.leave()
        return found
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: it holds the other end of the standard input."""

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end_with(others: Sequence[subprocess.Popen[bytes]]) -> None:
    """End this process, and the others, when one of them fails: it would be waited for until all patience is over."""

    def watch() -> None:
        while not any(one.poll() for one in others):
            time.sleep(LOOK_S)
        for one in others:
            one.kill()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Measure and print; every process but the first is started here."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    os.environ.update({key: value for key, value in CARDS.items() if key not in os.environ})
    devices, seconds, rank = given["devices"].split(","), float(given.get("seconds", "0.5")), int(given.get("rank", "0"))
    read_bytes = int(given.get("read_gib", "0")) * 2**30
    if rank:
        _end_with_parent()
        _timed(devices, rank, given["meet"], seconds, read_bytes)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-ranks-") as folder:
        address = f"file://{folder}/meet"
        command = [sys.executable, "-m", "penstock.runtime.timed.rank_times", *sys.argv[1:], f"meet={address}"]
        others = [
            subprocess.Popen([*command, f"rank={other}"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            for other in range(1, len(devices))
        ]
        _end_with(others)
        try:
            print(json.dumps(_timed(devices, 0, address, seconds, read_bytes)), flush=True)
            for other in others:
                other.wait(PATIENCE_S)
        finally:
            for other in others:
                other.kill()
                other.wait()


if __name__ == "__main__":
    main()
