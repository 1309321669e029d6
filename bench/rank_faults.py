"""Ranks that are lost in the middle of a run: how long it takes until all have ended, what is said, what stays behind.

    python bench/rank_faults.py work=/dev/shm/penstock out=rank-faults.json ranks=4 [cases=killed,stopped,leader,neighbour]
    python bench/rank_faults.py work=bench-work ranks=2 hardware=cpu cases=killed,stopped,leader     # without cards

Each case is a run of its own, of more tokens than it can make. `after` seconds behind its start the last rank is `killed` by SIGKILL or
`stopped` by SIGSTOP, or rank 0 is killed (`leader`). For `neighbour` another program has the last card's VRAM before the run begins. All
must have ended within 10 s with one line that names the rank, or the card; then no process of the run is left, and no card holds more than
before.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from bench.cases import Row, chosen, run_cases  # noqa: E402
from bench.hybrid import profile_of  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.link import Bench, machine  # noqa: E402

KEYS = ("work", "out", "cases", "ranks", "model", "layers", "hardware", "after")
ENDED_S, PATIENCE_S = 10.0, 60.0
FREE_MIB = 64
"""What a card's own use of memory may differ by between two looks."""
PROGRAM = "import sys; sys.argv[0] = 'runtime'; from penstock.runtime.cli import main; main()"
HOG = (
    "import sys, time, torch; card = torch.device('cuda', int(sys.argv[1])); free, _ = torch.cuda.mem_get_info(card);"
    "kept = torch.empty(free - (256 << 20), dtype=torch.uint8, device=card); print('holds', flush=True); time.sleep(600)"
)


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
        """The run refuses by itself: its seconds are those from its start."""
        return self._run("another program has the last card's VRAM", _hogged(self.ranks - 1), None)

    def _lost(self, case: str, how: signal.Signals, rank: int) -> Iterator[Row]:
        def lose(run: psutil.Process) -> None:
            ranks = {0: run} | {_rank(each): each for each in run.children(recursive=True) if _rank(each) is not None}
            os.kill(ranks[rank].pid, how)

        return self._run(case, nullcontext(), lose)

    def _run(self, case: str, beside: AbstractContextManager[None], lose: Callable[[psutil.Process], None] | None) -> Iterator[Row]:
        before = _used_mib(self.cards)
        with beside:
            begun = time.monotonic()
            run = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "run", f"plan={self.plan}"],
                env=self.bench.env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            family = [psutil.Process(run.pid)]
            try:
                if lose is not None:
                    time.sleep(self.after_s)
                    if run.poll() is not None:
                        raise SystemExit(f"{case}: the run ended before; its last words: {run.communicate()[1][-500:]}")
                    family += family[0].children(recursive=True)
                    begun = time.monotonic()
                    lose(family[0])
                _, said = run.communicate(timeout=PATIENCE_S)
                _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
                took = time.monotonic() - begun
            finally:
                for each in family:
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
        lines = [line for line in said.splitlines() if line.strip()]
        print(f"    {case}: {lines[-1] if lines else ''}", file=sys.stderr, flush=True)
        yield _row(case, "all have ended", took, ENDED_S, "s")
        yield _row(case, "lines that were said", len(lines), 1, "")
        yield _row(case, "processes left", len(alive), 0, "")
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


def _used_mib(cards: int) -> list[float]:
    """Of each of the first ``cards``."""
    if not cards:
        return []
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [float(line) for line in subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()][:cards]


@contextmanager
def _hogged(card: int) -> Iterator[None]:
    """Another program has all but 256 MiB of ``card``."""
    hog = subprocess.Popen([sys.executable, "-c", HOG, str(card)], stdout=subprocess.PIPE, text=True)
    try:
        assert hog.stdout is not None
        if not hog.stdout.readline():
            raise SystemExit(f"the program that takes the VRAM of card {card} ended")
        yield
    finally:
        hog.kill()
        hog.wait()


def main() -> None:
    given = given_of(sys.argv[1:], KEYS)
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    played = given.get("hardware", "local") != "local"
    profile = {"gpu": None, "cpu": {"cores": 0}, "dram_bytes": 0} if played else profile_of(bench, "true")
    faults = Faults(bench, given)
    known = {each.__name__: partial(each) for each in (faults.killed, faults.stopped, faults.leader, faults.neighbour)}
    cases = chosen(given.get("cases", ",".join(known) if faults.cards else "killed,stopped,leader"), known)
    run_cases(cases, machine(profile) | {"keys": dict(given)}, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
