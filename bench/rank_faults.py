"""Ranks that are lost in the middle of a run: how long it takes until all have ended, what is said, what stays behind.

    python bench/rank_faults.py work=/dev/shm/penstock out=rank-faults.json ranks=4 [cases=killed,stopped,leader,neighbour,newcomer]
    python bench/rank_faults.py work=bench-work ranks=2 hardware=cpu cases=killed,stopped,leader     # without cards

Each case is a run of its own, of more tokens than it can make. `after` seconds behind its start the last rank is `killed` by SIGKILL or
`stopped` by SIGSTOP, or rank 0 is killed (`leader`). For `neighbour` another program has all but 256 MiB of the last card before the run
begins: seconds are those from its start. For `newcomer` it takes them once the ranks are processes, which import and have not opened their
cards: that rank finds it as it opens its own, so what a start takes until then (`after` at most) counts, too. All must have ended within
10 s with one line that names the rank; then no process of the run is left, and no card holds more than before.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from bench.cases import Row, chosen, run_cases  # noqa: E402
from bench.keys import given_of, told_keys  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from bench.probed import profile_of  # noqa: E402

KEYS = ("work", "out", "cases", "ranks", "model", "layers", "hardware", "after")
ENDED_S, PATIENCE_S = 10.0, 60.0
FREE_MIB = 64
"""What a card's own use of memory may differ by between two looks."""
PROGRAM = "import sys; sys.argv[0] = 'runtime'; from penstock.runtime.cli import main; main()"
HOG = (
    "import sys, time, torch; card = torch.device('cuda', int(sys.argv[1])); torch.cuda.mem_get_info(card); print('ready', flush=True);"
    "sys.stdin.readline(); kept = torch.empty(torch.cuda.mem_get_info(card)[0] - (256 << 20), dtype=torch.uint8, device=card);"
    "print('holds', flush=True); time.sleep(600)"
)
"""Has its context on a card before it is told, by a line, to take the VRAM."""


class Faults:
    """Runs of one plan."""

    def __init__(self, bench: Bench, given: Mapping[str, str]):
        self.bench, self.ranks, self.after_s = bench, int(given.get("ranks", "2")), float(given.get("after", "20"))
        self.hardware = given.get("hardware", "local")
        model, layers = given.get("model", "demo"), given.get("layers", "8")
        self.checkpoint = bench.checkpoint(f"{model}-{layers}", f"model={model}", f"model.layers={layers}")
        self.cards = self.ranks if self.hardware == "local" else 0
        self.plan = bench.work / f"faults-{self.ranks}.yaml"
        work = ("workload.prompt_tokens=64", "workload.new_tokens=30000", "workload.context_tokens=0")
        asked = (f"hardware={self.hardware}", f"ranks={self.ranks}", "model=hf", f"model.checkpoint={self.checkpoint}", *work)
        bench.call("planner", "solve", *asked, f"out={self.plan}")

    def killed(self) -> Iterator[Row]:
        return self._lost("the last rank is killed", signal.SIGKILL, self.ranks - 1)

    def stopped(self) -> Iterator[Row]:
        return self._lost("the last rank is stopped", signal.SIGSTOP, self.ranks - 1)

    def leader(self) -> Iterator[Row]:
        return self._lost("rank 0 is killed", signal.SIGKILL, 0)

    def neighbour(self) -> Iterator[Row]:
        """The run refuses by itself, before it starts ranks."""
        with Hog(self.ranks - 1) as hog:
            hog.take()
            yield from self._run("another program has the last card's VRAM", self.ranks - 1)

    def newcomer(self) -> Iterator[Row]:
        """The rank is refused a context, or room for what it has there."""

        def lose(run: psutil.Process) -> None:
            until = time.monotonic() + PATIENCE_S
            while not any(_rank(each) for each in run.children(recursive=True)) and time.monotonic() < until:
                time.sleep(0.05)
            hog.take()

        with Hog(self.ranks - 1) as hog:
            case, ended_s = "another program takes it as ranks start", ENDED_S + self.after_s
            yield from self._run(case, self.ranks - 1, lose, ended_s=ended_s, ended=hog.end)

    def _lost(self, case: str, how: signal.Signals, rank: int) -> Iterator[Row]:
        def lose(run: psutil.Process) -> None:
            ranks = {0: run} | {_rank(each): each for each in run.children(recursive=True) if _rank(each) is not None}
            os.kill(ranks[rank].pid, how)

        return self._run(case, rank, lose, self.after_s)

    def _run(
        self,
        case: str,
        rank: int,
        lose: Callable[[psutil.Process], None] = lambda run: None,
        after_s: float = 0.0,
        ended_s: float = ENDED_S,
        ended: Callable[[], None] = lambda: None,
    ) -> Iterator[Row]:
        """``lose`` is called ``after_s`` seconds behind the start, and all are to end within ``ended_s``; ``ended`` is called before VRAM
        is looked at. What is said is to name ``rank``."""
        before, begun = _used_mib(self.cards), time.monotonic()
        run = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "run", f"plan={self.plan}"],
            env=self.bench.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        first = psutil.Process(run.pid)
        family = {run.pid: first}
        over = threading.Event()
        look = threading.Thread(target=_note_children, args=(first, family, over))
        look.start()
        try:
            if after_s:
                time.sleep(after_s)
                if run.poll() is not None:
                    raise SystemExit(f"{case}: the run ended before; its last words: {run.communicate()[1][-500:]}")
                begun = time.monotonic()
            lose(first)
            _, said = run.communicate(timeout=PATIENCE_S)
            over.set()
            look.join()
            _, alive = psutil.wait_procs(list(family.values()), timeout=PATIENCE_S)
            took = time.monotonic() - begun
        finally:
            over.set()
            look.join()
            for each in family.values():
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        lines = [line for line in said.splitlines() if line.strip()]
        print(f"    {case}: {lines[-1] if lines else ''}", file=sys.stderr, flush=True)
        yield _row(case, "all have ended", took, ended_s, "s")
        yield _row(case, "lines that were said", len(lines), 1, "")
        yield _row(case, "lines that do not name the rank", sum(f"rank {rank}" not in line for line in lines), 0, "")
        yield _row(case, "processes left", len(alive), 0, "")
        ended()
        if self.cards:
            more = max(now - then for now, then in zip(_used_mib(self.cards), before, strict=True))
            yield _row(case, "VRAM left behind", more, FREE_MIB, "MiB")


def _row(case: str, what: str, found: float, most: float, unit: str) -> Row:
    return Row(case, what, found, most, unit, found / most if most else 1.0 + found, "<= 1.0", None, 0, 0)


def _rank(process: psutil.Process) -> int | None:
    """None for a process that is no rank, or is gone."""
    with suppress(psutil.NoSuchProcess):
        found = process.environ().get("RANK")
        return None if found is None else int(found)
    return None


def _note_children(first: psutil.Process, family: dict[int, psutil.Process], over: threading.Event) -> None:
    """Until it is ``over``: whom ``first`` has started, and whom those have. A process whose parent has ended is not found later."""
    while not over.wait(0.2):
        with suppress(psutil.NoSuchProcess):
            family |= {each.pid: each for each in first.children(recursive=True)}


def _used_mib(cards: int) -> list[float]:
    """Of each of the first ``cards``."""
    if not cards:
        return []
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [float(line) for line in subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()][:cards]


class Hog:
    """Another program on ``card``, with a context there: it takes all but 256 MiB when it is told to."""

    def __init__(self, card: int):
        self._card = card
        self._run = subprocess.Popen([sys.executable, "-c", HOG, str(card)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Hog:
        self._hear()
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def take(self) -> None:
        assert self._run.stdin is not None
        self._run.stdin.write("\n")
        self._run.stdin.flush()
        self._hear()

    def end(self) -> None:
        """Its VRAM is free. A second call does nothing."""
        self._run.kill()
        self._run.wait()

    def _hear(self) -> None:
        assert self._run.stdout is not None
        if not self._run.stdout.readline():
            self.end()
            raise SystemExit(f"the program that takes the VRAM of card {self._card} ended")


def main() -> None:
    given = given_of(sys.argv[1:], KEYS)
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    played = given.get("hardware", "local") != "local"
    profile = {"gpu": None, "cpu": {"cores": 0}, "dram_bytes": 0} if played else profile_of(bench, "true")
    faults = Faults(bench, given)
    known = {each.__name__: partial(each) for each in (faults.killed, faults.stopped, faults.leader, faults.neighbour, faults.newcomer)}
    cases = chosen(given.get("cases", ",".join(known) if faults.cards else "killed,stopped,leader"), known)
    run_cases(cases, machine(profile) | {"keys": told_keys(given)}, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
