"""A bench over a machine that was probed once, and its cases as the command line asks for them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, chosen, run_cases  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from bench.worker import Failed, Worker  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402

HANG_S = 300.0


def probe(bench: Bench, quick: str) -> dict:
    asked = {"path": bench.work, "name": "local", "quick": quick, "force": "true"}
    return bench.call("planner", "probe", *(f"probe.{key}={value}" for key, value in asked.items()))


def profile_of(bench: Bench, quick: str) -> dict:
    """What `planner probe` said of this machine, once for all commands over the same directory. With the CPU's products it takes two
    minutes; a quick one leaves them out. One that has them serves both."""
    kept = bench.work / "profile.json"
    known = json.loads(kept.read_text()) if kept.exists() else None
    if known is not None and (quick == "true" or known["host"] or not known["gpu"]):
        return known
    found = probe(bench, quick)
    if quick != "true" and found["gpu"] and not found["host"]:
        raise UserError("the probe has no rates of the CPU's products, so no plan would have units of the CPU; its warnings say why")
    kept.write_text(json.dumps(found))
    return found


def adopt_profile(bench: Bench, source: Path) -> None:
    """The machine as it was probed for commands over ``source``. UserError where it was not."""
    files = ("profile.json", "config/hardware/local.yaml")
    for name in files:
        if not (source / name).is_file():
            raise UserError(f"profile={source}: has no {name}; name the work= of a command that ran on this machine, or leave profile= out")
    if source.resolve() != bench.work:
        (bench.work / files[1]).parent.mkdir(parents=True, exist_ok=True)
        for name in files:
            shutil.copyfile(source / name, bench.work / name)


Cases = Callable[[Bench, Worker, Mapping, Mapping[str, str]], object]
"""Makes what has the cases as methods."""


def play(of: Cases, names: Sequence[str], usual: str, keys: Sequence[str]) -> None:
    """The cases ``names`` of what ``of`` makes, as the command line asks for them by ``keys``; ``usual`` where it names none."""
    try:
        given = given_of(sys.argv[1:], keys)
        bench = Bench(Path(given.get("work", "bench-work")).resolve())
        if "profile" in given:
            adopt_profile(bench, Path(given["profile"]).expanduser())
        profile = profile_of(bench, given.get("quick", "false"))
        with closing(Worker(HANG_S)) as worker:
            one = of(bench, worker, profile, given)
            methods: dict[str, Callable[[], Iterator[Row]]] = {name: partial(getattr(one, name)) for name in names}
            run_cases(chosen(given.get("cases", usual), methods), machine(profile), Path(given["out"]) if "out" in given else None)
    except (UserError, Failed) as error:
        raise SystemExit(str(error)) from None
