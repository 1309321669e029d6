"""A server on its bad days: each case counts what went wrong, and none may.

    python bench/serve_faults.py checkpoint=DIR work=bench-work out=serve-faults.json cases=engine,front engine=200 front=50
    python bench/serve_faults.py checkpoint=DIR cases=storm requests=10000
    python bench/serve_faults.py checkpoint=DIR cases=disk,clock,never_reads,silent,headers,smuggled,template,characters

`engine`: SIGKILLs of the engine under load, with `kv.dir`; replies end in an error event or are right, then and afterwards. `hang`:
SIGSTOPs, found after `hang_s`. `front`: SIGKILLs of the front; the engine ends within 5 s. `drain`: SIGTERMs of the front. `disk`: the
directory of pages takes no more bytes. `clock`: the wall clock jumps by days. `never_reads`: clients that read nothing of long replies.
`silent`: 1,000 connections that say nothing. `headers`: of 1 MB. `smuggled`: requests inside bodies, behind headers that may be read in two
ways. `template`: a chat template that raises. `characters`: replies cut within emoji and CJK. `storm`: `requests` of 64 clients, of whom
some go away, read slowly or send what is no request (bench/serve_storm.py). Engines that are killed are forked from a process with their
imports (bench/warm_motors.py).

`checkpoint` is a trained one with a byte-level tokenizer: replies are compared, so no token of them may be a tie. Runs on the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Case, chosen, run_cases  # noqa: E402
from bench.fault_foes import Foes  # noqa: E402
from bench.fault_grounds import Grounds  # noqa: E402
from bench.fault_kills import Kills  # noqa: E402
from bench.fault_rig import FaultRig  # noqa: E402
from bench.fault_storm import Storms  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from bench.probed import profile_of  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402

KEYS = ("checkpoint", "work", "out", "cases", "engine", "hang", "front", "drain", "requests", "clients", "seed", "new")


def cases_of(rig: FaultRig) -> dict[str, Case]:
    kills, grounds, foes, storms = Kills(rig), Grounds(rig), Foes(rig), Storms(rig)
    of_kills: dict[str, Case] = {"engine": kills.engine, "hang": kills.hang, "front": kills.front, "drain": kills.drain}
    of_grounds = {"disk": grounds.disk, "clock": grounds.clock, "template": grounds.template, "characters": grounds.characters}
    of_foes = {"never_reads": foes.never_reads, "silent": foes.silent, "headers": foes.headers, "smuggled": foes.smuggled}
    return of_kills | of_grounds | of_foes | {"storm": storms.storm}


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
        if "checkpoint" not in given:
            raise UserError("checkpoint: missing; give a trained checkpoint's directory, checkpoint=DIR")
    except UserError as error:
        raise SystemExit(str(error)) from None
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    methods = cases_of(FaultRig(bench, given))
    where = {"gpu": None, "checkpoint": Path(given["checkpoint"]).name} | machine(profile_of(bench, "true"))
    run_cases(chosen(given.get("cases", "storm"), methods), where, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
