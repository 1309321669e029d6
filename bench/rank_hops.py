"""A hop of one token's hidden state between two cards, by each way that a recorded step of ranks could take it.

    python bench/rank_hops.py devices=0,1 out=rank-hops.json        # a minute
    python bench/rank_hops.py devices=0,0 rounds=50 out=one-card.json   # both ranks on one card: see below
    python bench/rank_hops.py devices=cpu,cpu out=hops.json         # without cards it runs: gloo, and words that the CPU plays

Each way with links idle and with both busy; microseconds of a hop, the median and the 99th percentile of `rounds` rounds:

    copied launched the copy engine, in an order that words keep: what launched hops between cards are, `runtime/hops/peer_hop.py`
    nccl launched   send and receive, each launched by the host: where cards do not reach each other
    nccl recorded   the same inside a CUDA graph
    words launched  page-locked memory that both cards share, kernels, and words in that memory: `runtime/hops/word_ways.py`
    words recorded  the same inside a CUDA graph

A recorded round is 8 times there and back behind one that is not timed; a launched one is once there and back. Without cards nothing is
recorded. A way that a machine refuses has its reason in place of figures.

NCCL takes no card for two ranks. On one card `gloo launched` stands in its place, which copies by the host. Two processes get such a card
in turns of a millisecond or more: their figures say that words are right there, not how fast they are. One more row tells that:

    words, one process   both ranks' graphs on streams of one process: a card's word to itself through the host's memory
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.keys import given_of  # noqa: E402
from penstock.runtime.hops.hop import Hop, HopMeter  # noqa: E402
from penstock.runtime.hops.hops import Hops  # noqa: E402
from penstock.runtime.hops.torch_hop import Sent, StagedHop, TorchHop  # noqa: E402
from penstock.runtime.hops.word_ways import HopPlaces, WordWays  # noqa: E402
from penstock.runtime.memory.device import CudaDevice  # noqa: E402
from penstock.runtime.timed.rank_times import LEAST_READ, PATIENCE_S, TorchCard, TorchMeeting  # noqa: E402
from penstock.runtime.timed.recorded_hops import CardWords, Recorded, Trip, shared_by, there_and_back  # noqa: E402

KEYS = ("devices", "out", "rounds", "nbytes", "rank", "meet")


class PlayedWords:
    """Words that a CPU writes, and waits for by looking, in the shared memory itself."""

    def __init__(self, memory: torch.Tensor):
        self._begin, self._words = memory.data_ptr(), memory[: memory.numel() // 4 * 4].view(torch.int32)

    def write_word(self, address: int, value: int) -> None:
        self._words[(address - self._begin) // 4] = value

    def wait_word(self, address: int, value: int) -> None:
        at = (address - self._begin) // 4
        while int(self._words[at]) != value:
            time.sleep(0)


def by_group(rank: int, one_card: bool, device: torch.device) -> Hop:
    """By NCCL or gloo."""
    by_nccl = device.type == "cuda" and not one_card
    group = dist.new_group(backend="nccl", device_id=device) if by_nccl else dist.new_group(backend="gloo")
    hop = TorchHop(group, 1 - rank, HopMeter(), Sent())
    return StagedHop(hop) if one_card else hop


def launched_us(trip: Trip, rounds: int, settle: Callable[[], None]) -> list[float]:
    """Microseconds of a hop in each round, as the host sees it."""
    found = []
    for _ in range(rounds + 10):
        begun = time.perf_counter()
        trip()
        settle()
        found.append((time.perf_counter() - begun) * 1e6 / 2)
    return found[10:]


def measured(rank: int, names: Sequence[str], address: str, rounds: int, nbytes: int) -> list[dict[str, Any]]:
    """Rows of each way, idle and busy. Both ranks call it."""
    name, one_card = names[rank], names[0] == names[1] != "cpu"
    device = torch.device("cpu") if name == "cpu" else torch.device("cuda", int(name))
    card = TorchCard(device, 2, LEAST_READ)
    meeting = TorchMeeting(rank, 2, address)
    lock = CudaDevice(device.index) if card.cuda else None
    hidden, places = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device), HopPlaces(2, nbytes)
    memory = shared_by(meeting, places.all_bytes, lock)
    flags = CardWords() if card.cuda else PlayedWords(memory.bytes)
    seen = memory.bytes if lock is None else lock.alias(memory.bytes)
    both = [WordWays(number, places, memory.bytes.data_ptr(), seen, flags) for number in (0, 1)]
    settle = torch.cuda.current_stream().synchronize if card.cuda else lambda: None
    group = "nccl" if card.cuda and not one_card else "gloo"
    hops: dict[str, Hop] = {group: by_group(rank, one_card, device), "words": both[rank].of(1 - rank)}
    ways = Hops(rank, [(0, 1), (1, 0)], device, dist.new_group(backend="gloo"), one_card) if card.cuda else None
    if ways is not None and ways.refused is None:
        hops["copied"] = ways.of(1 - rank)
    rows = []
    with torch.inference_mode():
        for way, hop in hops.items():
            trip = there_and_back(rank, hop, hidden)
            for recorded in (False, True) if card.cuda and way in ("nccl", "words") else (False,):
                for busy in (False, True):
                    meeting.gathered(0.0)
                    row: dict[str, Any] = {"way": f"{way} {'recorded' if recorded else 'launched'}", "links": "busy" if busy else "idle"}
                    beside: AbstractContextManager[Any] = card.busy() if busy else nullcontext()
                    try:
                        with beside:
                            took = Recorded([trip]).us(rounds) if recorded else launched_us(trip, rounds, settle)
                        row |= quantiles(took)
                    except RuntimeError as error:  # both ranks are refused alike: before anything is launched
                        row["refused"] = str(error).strip().partition("\n")[0][:200]
                    rows.append(row)
    meeting.gathered(0.0)
    settle()
    if one_card and rank == 0:
        with torch.inference_mode():
            trips = [there_and_back(number, both[number].of(1 - number), hidden.clone()) for number in (0, 1)]
            rows += [{"way": "words, one process", "links": "idle", **quantiles(Recorded(trips).us(rounds))}]
    meeting.gathered(0.0)
    memory.close()
    if ways is not None:
        ways.close()
    return rows


def quantiles(took_us: list[float]) -> dict[str, float]:
    """The median, and what 99 of 100 rounds do not exceed."""
    ordered = sorted(took_us)
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * at))], 2) for name, at in (("p50_us", 0.5), ("p99_us", 0.99))}


def main() -> None:
    given = given_of(sys.argv[1:], KEYS)
    devices, rounds, nbytes = given["devices"].split(","), int(given.get("rounds", "300")), int(given.get("nbytes", "16384"))
    if len(devices) != 2:
        raise SystemExit(f"devices={given['devices']}: must be two, such as devices=0,1")
    if "rank" in given:
        measured(1, devices, given["meet"], rounds, nbytes)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory(prefix="penstock-hops-") as folder:
        address = f"file://{folder}/meet"
        other = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "rank=1", f"meet={address}"])
        try:
            rows = measured(0, devices, address, rounds, nbytes)
            dist.destroy_process_group()
            other.wait(PATIENCE_S)
        finally:
            other.kill()
            other.wait()
    for row in rows:
        print(f"{row['way']:<20}{row['links']:<6}" + (row.get("refused") or f"{row['p50_us']:>9} us{row['p99_us']:>10} us (99 of 100)"))
    name = "CPU" if devices[0] == "cpu" else torch.cuda.get_device_name(int(devices[0]))
    document = {"devices": [name] * 2, "torch": torch.__version__, "nbytes": nbytes, "rounds": rounds, "rows": rows}
    if "out" in given:
        Path(given["out"]).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
