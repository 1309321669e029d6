"""Hostile inputs, as many as there is time for: each is read, or refused in one line, without a traceback, a hang or memory of its own.

    python bench/fuzz.py                                            # a minute
    python bench/fuzz.py seconds=600 seed=7 out=fuzz.json found=DIR # longer; what bites is kept in DIR
    python bench/fuzz.py kinds=plan,trace

Kinds: plan files (read, checked, exported and acted out), command lines of `planner solve` (composed, checked, solved), manifests of packed
stores, safetensors files beside a config.json, routings (read and replayed). Each case is a sound input after a few edits, drawn from
``seed``: bytes flipped, cut, doubled; leaves of trees made absurd. A case bites when anything but a UserError leaves the reader, when it
takes more than 10 s of CPU, or when the process grows by more than 512 MB. Status 1 where one does. Memory: that of the kinds' seeds.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import xxhash  # noqa: E402
import yaml  # noqa: E402

from bench.fuzz_seeds import (  # noqa: E402
    CONFIG,
    OVERRIDES,
    WEIGHTS_BYTES,
    header,
    layer_trace,
    manifest,
    packed_header,
    plans,
    trace,
)
from bench.keys import given_of, read_values  # noqa: E402
from bench.mutate import ABSURD, mutated_bytes, mutated_tree  # noqa: E402
from penstock.planner.cli import PROGRAM  # noqa: E402
from penstock.planner.common.command.known_keys import keys_of  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint  # noqa: E402
from penstock.planner.contract.config.config_schema import SolveConfig  # noqa: E402
from penstock.planner.contract.decided.decisions import ExpertPolicyName  # noqa: E402
from penstock.planner.contract.experts.prefetch import Prefetch  # noqa: E402
from penstock.planner.contract.experts.routing_files import read_routings  # noqa: E402
from penstock.planner.contract.plan.planfile import check_plan, read_plan, write_plan  # noqa: E402
from penstock.planner.export.exported import Request  # noqa: E402
from penstock.planner.export.targets import TARGETS  # noqa: E402
from penstock.planner.replay.comparison import compare  # noqa: E402
from penstock.planner.simulate.act import Simulation  # noqa: E402
from penstock.planner.solver.planning import make_plan  # noqa: E402
from penstock.planner.verbs.simulation_length import check_length  # noqa: E402

HANG_S = 10
MOST_GROWTH_BYTES = 512 << 20
MOST_ACTED = 20_000
"""Units of a plan that are acted out: a fuzz tries many plans, not long ones."""


class Hang(Exception):
    """A case took ``HANG_S`` of CPU."""


@dataclass
class Tally:
    """What became of one kind's cases."""

    cases: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    bites: Counter[str] = field(default_factory=Counter)
    """Where it happened -> how often."""


Try = Callable[[random.Random, Path], bytes]
"""Makes a case in a directory of its own, reads it, and gives it back for whoever wants to keep it. Raises what the reader raises."""


@contextlib.contextmanager
def _of(made: bytes) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.__dict__["case"] = made
        raise


def kinds(work: Path) -> dict[str, Try]:
    """Every kind, with its seeds made in ``work``."""
    sound_plans = plans(work)
    trees = [yaml.safe_load(text) for text in sound_plans]

    def plan(chance: random.Random, place: Path) -> bytes:
        made = (
            mutated_bytes(chance.choice(sound_plans), chance)
            if chance.random() < 0.4
            else yaml.safe_dump(mutated_tree(chance.choice(trees), chance), sort_keys=False).encode("utf-8", "replace")
        )
        path = place / "plan.yaml"
        path.write_bytes(made)
        with _of(made):
            read = read_plan(path)
            check_plan(read)
            write_plan(read, place / "again.yaml")
            for target in TARGETS:
                target.export(Request(read, "plan.yaml"))
            check_length(read)
            passes = read.workload.requests * (
                read.workload.new_tokens + read.workload.prompt_tokens // read.decisions.prefill_chunk_tokens
            )
            if passes * read.model.layers * (1 if read.model.experts is None else 10) < MOST_ACTED:
                Simulation(read).run()
        return made

    return {"plan": plan, "override": _override, "manifest": _manifest, "header": _header, "trace": _trace}


def _override(chance: random.Random, place: Path) -> bytes:
    typed = list(chance.choice(OVERRIDES))
    for _ in range(chance.choice((1, 1, 2))):
        at = chance.randrange(len(typed))
        key, _, value = typed[at].partition("=")
        absurd = chance.choice(ABSURD)
        edits = (
            f"{key}={absurd}",
            f"{chance.choice(_KEYS)}={absurd}",
            f"{chance.choice(_KEYS)}={chance.choice(_VALUES)}",
            mutated_bytes(typed[at].encode(), chance).decode("utf-8", "replace"),
        )
        typed.append(chance.choice(edits))
    typed.append("calibration=off")
    made = json.dumps(typed).encode()
    with _of(made):
        make_plan(PROGRAM.configuration("solve", typed))
    return made


_VALUES = ("0", "1", "2", "7", "64", "1GiB", "1e9", "${hardware.dram_bytes}", "${hardware.ssd}", "[[4096,1,1.0]]", "null", "lru", "pinned")
_KEYS = (*keys_of(SolveConfig), "hardware", "model", "workload")


def _manifest(chance: random.Random, place: Path) -> bytes:
    from penstock.runtime.store.manifest import read_manifest, superblock

    body = mutated_tree(manifest(), chance)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    made = json.dumps(body | {"checksum": xxhash.xxh3_128_hexdigest(text.encode())}, sort_keys=True).encode()
    made = mutated_bytes(made, chance) if chance.random() < 0.2 else made
    (place / "manifest.json").write_bytes(made)
    (place / "config.json").write_text(json.dumps(CONFIG))
    (place / "weights.bin").write_bytes(superblock(manifest()["uuid"]).ljust(WEIGHTS_BYTES, b"\0"))
    with _of(made):
        with contextlib.suppress(UserError):
            spec_from_checkpoint(place)
        read_manifest(place)
    return made


def _header(chance: random.Random, place: Path) -> bytes:
    sound = header()
    nbytes = max(value["data_offsets"][1] for name, value in sound.items() if name != "__metadata__")
    config: Any = dict(CONFIG)
    if chance.random() < 0.5:
        config = mutated_tree(config, chance)
    else:
        sound = mutated_tree(sound, chance)
    text, told = json.dumps(sound).encode(), json.dumps(config).encode()
    text = mutated_bytes(text, chance) if chance.random() < 0.3 else text
    told = mutated_bytes(told, chance) if chance.random() < 0.2 else told
    file = packed_header(text, nbytes)
    (place / "model.safetensors").write_bytes(mutated_bytes(file, chance) if chance.random() < 0.1 else file)
    (place / "config.json").write_bytes(told)
    with _of(told + b"\n" + file):
        spec_from_checkpoint(place)
    return told


def _trace(chance: random.Random, place: Path) -> bytes:
    import gzip
    import lzma

    made = chance.choice((trace(), layer_trace()))
    if chance.random() < 0.6:
        rows = made.splitlines()
        at = chance.randrange(len(rows))
        rows[at] = json.dumps(mutated_tree(json.loads(rows[at]), chance)).encode()
        made = b"\n".join(rows)
    else:
        made = mutated_bytes(made, chance)
    pack = chance.choice((bytes, bytes, gzip.compress, lzma.compress))
    made = pack(made)
    made = mutated_bytes(made, chance) if pack is not bytes and chance.random() < 0.5 else made
    (place / "t").write_bytes(made)
    with _of(made):
        routings = read_routings(place / "t").all_decoded()
        if routings.count * routings.layers <= 64 and routings.count > 1:
            compare(routings, [ExpertPolicyName.lru, ExpertPolicyName.markov], [1], Prefetch(1, 0.0), lambda done: None)
    return made


def fuzz(
    chosen: Mapping[str, Try], seconds: float, seed: int, work: Path, bitten: Callable[[str, int, BaseException], None]
) -> dict[str, Tally]:
    """Cases of the ``chosen`` kinds for ``seconds`` of CPU, in equal shares. ``bitten`` hears kind, number and error of each that bites.
    The n-th case of a kind depends on ``seed`` and n alone."""
    tallies = {kind: Tally() for kind in chosen}
    spent = dict.fromkeys(chosen, 0.0)
    with _hangs():
        while (kind := min(spent, key=spent.__getitem__)) and sum(spent.values()) < seconds:
            began = time.process_time()
            _once(kind, chosen[kind], tallies[kind], seed, work, bitten)
            took = time.process_time() - began
            spent[kind] += took
            tallies[kind].slowest_s = max(tallies[kind].slowest_s, took)
    return tallies


def _once(kind: str, attempt: Try, tally: Tally, seed: int, work: Path, bitten: Callable[[str, int, BaseException], None]) -> None:
    number, before = tally.cases, _peak_bytes()
    tally.cases += 1
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    try:
        with tempfile.TemporaryDirectory(dir=work) as place, contextlib.redirect_stderr(io.StringIO()):
            attempt(random.Random(f"{seed} {kind} {number}"), Path(place))
        tally.accepted += 1
    except UserError as error:
        tally.refused += 1
        if not str(error).isprintable():
            tally.bites["a refusal of many lines"] += 1
            bitten(kind, number, error)
    except (Exception, Hang) as error:
        tally.bites[_where(error)] += 1
        bitten(kind, number, error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = _peak_bytes() - before
    if grown > MOST_GROWTH_BYTES:
        tally.bites[f"grew by more than {MOST_GROWTH_BYTES >> 20} MiB"] += 1
        bitten(kind, number, MemoryError(f"{grown} bytes"))


def _where(error: BaseException) -> str:
    """The exception and the last line of ours that it left."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{ROOT.name}/" in f.filename and "/bench/" not in f.filename]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}, {last.name}"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _hangs() -> Iterator[None]:
    def hang(number: int, frame: object) -> None:
        raise Hang(f"more than {HANG_S} s of CPU")

    usual = signal.signal(signal.SIGPROF, hang)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, usual)


def document(tallies: Mapping[str, Tally], seconds: float, seed: int) -> dict[str, Any]:
    """What is kept of a fuzz."""
    rows = [
        {
            "kind": kind,
            "cases": t.cases,
            "accepted": t.accepted,
            "refused": t.refused,
            "bites": dict(t.bites),
            "slowest_s": round(t.slowest_s, 3),
        }
        for kind, t in tallies.items()
    ]
    return {"python": sys.version.split()[0], "seconds": seconds, "seed": seed, "rows": rows}


def main(arguments: Sequence[str]) -> int:
    """Status 1 where something bit. UserError for keys that cannot be."""
    known = ("seconds", "seed", "kinds", "out", "found")
    given = given_of(arguments, known)
    values = {"seconds": 60, "seed": 0} | read_values(given, ("out", "found"), (), {"seconds": 1, "seed": 0})
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        every = kinds(work)
        names = given["kinds"].split(",") if "kinds" in given else list(every)
        if wrong := next((name for name in names if name not in every), None):
            raise UserError(f"kinds={wrong}: choose from {', '.join(every)}")

        def bitten(kind: str, number: int, error: BaseException) -> None:
            print(f"{kind} {number}: {_where(error)}: {str(error)[:200]}", flush=True)
            if "found" in values:
                place = values["found"]
                place.mkdir(parents=True, exist_ok=True)
                (place / f"{kind}-{number}").write_bytes(error.__dict__.get("case", b""))
                (place / f"{kind}-{number}.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="replace")

        tallies = fuzz({name: every[name] for name in names}, values["seconds"], values["seed"], work, bitten)
    result = document(tallies, values["seconds"], values["seed"])
    for row in result["rows"]:
        counts = f"{row['cases']:8} cases {row['accepted']:8} read {row['refused']:8} refused {sum(row['bites'].values()):4} bites"
        print(f"{row['kind']:10} {counts}  slowest {row['slowest_s']:.2f} s")
    if "out" in values:
        values["out"].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, separators=(",", ":")))
    return int(any(row["bites"] for row in result["rows"]))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"fuzz: {error}")
