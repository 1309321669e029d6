"""What waits for a card: the commands of bench/waiting.yaml, most needed first, as many as the minutes hold.

    python bench/waiting.py list=true
    python bench/waiting.py work=/dev/shm/penstock disk=/data/penstock out=results minutes=9 [names=gpt_oss,routed] [cards=2]

A machine with a card is often there for minutes. So a command is begun only where its seconds are left, what wants more cards than are
here is passed over, and the next call goes on behind what `out` says was done. A command ends at the latest when the minutes are over.
What it prints is `out/NAME.log`; `out/waiting.json` holds how each ended and how long it took. `work` should be a fast file system,
`disk` a drive. Rows beside llama.cpp look for its programs in `work/llama`: unpack them there before. The status is 1 where a command that
was begun failed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.keys import given_of, read_names, read_values  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.runtime.company.cards_here import cards_here  # noqa: E402

LIST = Path(__file__).with_suffix(".yaml")
KEYS = ("work", "disk", "out", "minutes", "names", "cards", "list")
FAILED = 1
_PROGRAM = "import sys; sys.argv[0] = {0!r}; from penstock.scripts import {0}; {0}()"
PROGRAMS = {
    "python": (),
    "pytest": ("-m", "pytest"),
    **{name: ("-c", _PROGRAM.format(name)) for name in ("planner", "runtime")},
}
"""First word of a command -> the interpreter's arguments in its place."""


@dataclass(frozen=True)
class Waiting:
    """A command that no card has run; ``after`` names one that must have ended well before."""

    name: str
    issue: int
    cards: int
    seconds: float
    predicts: str
    command: str
    after: str = ""

    def words(self, work: Path, disk: Path, out: Path) -> list[str]:
        return shlex.split(self.command.format(work=work, disk=disk, out=out))

    def __str__(self) -> str:
        return f"{self.name:14} issue {self.issue}  {self.cards} card{'s' * (self.cards > 1):1} {self.seconds:5.0f} s  {self.predicts}"


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status, negative for a signal's, and its seconds."""

    status: int
    seconds: float


def read_waiting(path: Path = LIST) -> tuple[Waiting, ...]:
    """UserError for a command that begins with a word that is none of ``PROGRAMS``."""
    rows = tuple(Waiting(**row) for row in yaml.safe_load(path.read_text()))
    for row in rows:
        program = row.command.partition(" ")[0]
        if program not in PROGRAMS:
            raise UserError(f"{path.name}: {row.name} begins with {program}; a command begins with {', '.join(PROGRAMS)}")
    return rows


def why_not(row: Waiting, done: dict[str, Ended], cards: int, left_s: float) -> str:
    """Why ``row`` is not begun now; empty where it is."""
    if row.name in done and done[row.name].status == 0:
        return "done before"
    if row.after and not (row.after in done and done[row.after].status == 0):
        return f"wants {row.after} first"
    if row.cards > cards:
        return f"wants {row.cards} cards, here are {cards}"
    return f"wants {row.seconds:.0f} s, {left_s:.0f} are left" if row.seconds > left_s else ""


def run(words: Sequence[str], log: Path, left_s: float) -> Ended:
    """``words`` as a group of processes, which is killed when ``left_s`` are over."""
    words = [sys.executable, *PROGRAMS[words[0]], *words[1:]]
    begun = time.monotonic()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    with (
        log.open("w") as file,
        subprocess.Popen(
            words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            process.wait(left_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(process.pid, signal.SIGKILL)
    return Ended(process.returncode, round(time.monotonic() - begun, 1))


def run_all(rows: Sequence[Waiting], where: dict[str, Path], cards: int, minutes: float) -> int:
    """Run what of ``rows`` the ``minutes`` hold, a line for each; 1 where one failed."""
    work, disk, out = where["work"], where.get("disk", where["work"]), where["out"]
    for folder in (work, disk, out):
        folder.mkdir(parents=True, exist_ok=True)
    state = out / "waiting.json"
    done = {name: Ended(**kept) for name, kept in json.loads(state.read_text()).items()} if state.exists() else {}
    end, failed = time.monotonic() + 60 * minutes, False
    for row in rows:
        left_s = end - time.monotonic()
        if why := why_not(row, done, cards, left_s):
            print(f"{row.name:14} not begun: {why}", flush=True)
            continue
        done[row.name] = ended = run(row.words(work, disk, out), out / f"{row.name}.log", left_s)
        state.write_text(json.dumps({name: asdict(kept) for name, kept in done.items()}, indent=1) + "\n")
        failed = failed or ended.status != 0
        print(f"{row.name:14} status {ended.status}, {ended.seconds:.0f} s; predicted: {row.predicts}", flush=True)
    return FAILED if failed else 0


def main(arguments: Sequence[str]) -> int:
    given, rows = given_of(arguments, KEYS), read_waiting()
    if given.get("list") == "true":
        print(*rows, sep="\n")
        return 0
    names = read_names(given, "names", [row.name for row in rows]).get("names")
    where = read_values(given, ("work", "disk", "out"), (), {})
    numbers = read_values(given, (), (), {"minutes": 1, "cards": 0})
    if missing := [key for key in ("work", "out", "minutes") if key not in given]:
        raise UserError(f"{missing[0]}: missing; give {' '.join(f'{key}=' for key in missing)}, or list=true")
    chosen = [row for row in rows if names is None or row.name in names]
    return run_all(chosen, where, numbers.get("cards", cards_here() or 0), numbers["minutes"])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        raise SystemExit(str(error)) from None
