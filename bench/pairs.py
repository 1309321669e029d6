"""Two versions of the code on the same work, in alternated pairs: is the new one as fast as the old?

    python bench/pairs.py old=OLD_TREE new=NEW_TREE work=/data/penstock cases=dram,prefill,batch,ssd pairs=5 out=pairs.json

Each tree measures the machine, solves and runs by its own code, every run in a process of its own; the order turns with every pair. The
new tree is given the old plan's decisions, so that code is compared and not two probes. A row gives the median of new over old, and how
far old was from old: the median of |ratio - 1| over consecutive runs of it. Rows that the SSD binds compare shares of the drive's rate,
which the run's own process measures before and after. `cases=host,drive` needs no GPU.

A tree's processes are forks of one that has imported torch and transformers (`bench/warm.py`). After every pair the table so far is
printed and `out` written: a run that is cut off has told what it found.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.link import limit_of, machine, step_s  # noqa: E402
from bench.warm import Warm  # noqa: E402

BATCH = 96
MOST = 1.01
"""Seconds of the new code over the old one's, unless the old one differs more from itself."""


@dataclass(frozen=True)
class Case:
    """What is solved and run, and the figures of a report that are compared: seconds, or, of what the SSD binds, the inverse of its share
    of the drive's rate; less is better."""

    model: tuple[str, ...]
    solve: tuple[str, ...]
    figures: Mapping[str, Callable[[dict], float]]
    limits: bool = False


def prefill_s(report: dict) -> float:
    """The median prefill, the first left out as warm-up when there are others."""
    each = report["prefill_each_s"]
    return median(each[1:] or each)


def issue_s(report: dict) -> float:
    """Host seconds that the copier takes for one unit."""
    return report["ring"]["issue_s"] / report["ring"]["units"]


def ssd_inverse_share(report: dict) -> float:
    """Drive's rate, mean of before and after, over the rate at which decode steps read."""
    return limit_of(report, "ssd_gbps") / (report["measured"]["ssd_bytes_per_token"] / step_s(report) / 1e9)


def work(prompt: int, new: int, batch: int, requests: int) -> tuple[str, ...]:
    keys = {"prompt_tokens": prompt, "new_tokens": new, "batch": batch, "requests": requests * batch}
    return tuple(f"workload.{key}={value}" for key, value in keys.items())


EIGHT = ("model=llama8b",)
CASES: Mapping[str, Case] = {
    "dram": Case(
        EIGHT,
        ("hardware.vram_bytes=6GiB", *work(2048, 12, 1, 3)),
        {"decode": step_s, "prefill 2048": prefill_s, "copier, a unit": issue_s},
    ),
    "prefill": Case(EIGHT, ("hardware.vram_bytes=6GiB", *work(8192, 12, 1, 2)), {"decode": step_s, "prefill 8192": prefill_s}),
    "batch": Case(EIGHT, ("hardware.vram_bytes=12GiB", *work(512, 16, BATCH, 1)), {f"decode batch {BATCH}": step_s}),
    "resident": Case(EIGHT, ("hardware.vram_bytes=40GiB", *work(512, 32, 32, 1)), {"decode batch 32, nothing streams": step_s}),
    "ssd": Case(
        ("model=llama8b", "model.layers=8"),
        ("hardware.vram_bytes=3GiB", "hardware.dram_bytes=2600MB", *work(512, 6, 1, 1)),
        {"decode, SSD": ssd_inverse_share},
        limits=True,
    ),
    "drive": Case(
        ("model=demo",),
        ("hardware.dram_bytes=512MiB", *work(128, 16, 1, 1)),
        {"decode, SSD, no GPU": ssd_inverse_share},
        limits=True,
    ),
    "host": Case(("model=demo",), ("hardware.dram_bytes=512MiB", *work(128, 12, 1, 3)), {"decode": step_s, "prefill 128": prefill_s}),
}


def forced(decided: Mapping) -> tuple[str, ...]:
    """Keys that fix what another solve ``decided`` of a model without experts."""
    weights, kv = decided["weights"], decided["kv"]
    vram, dram = weights["vram"], weights["dram"]
    keys = {f"resident_{kind}": units for kind, units in vram["resident_units"].items()}
    keys |= {"policy": weights["policy"], "embedding": weights["embedding"], "page_tokens": kv["page_tokens"]}
    keys |= {"vram_slots": vram["slots"], "vram_prefetch_distance": vram["prefetch_distance"]}
    host = weights.get("host", {})
    keys |= {"host_ffn": host.get("ffn", 0)} | ({"host_head": host["head"]} if host.get("head") else {})  # older versions know no such key
    keys |= {key: dram[key] for key in ("cap_layers", "hwm_layers", "prefetch_distance")}
    keys |= {**weights["ssd"], **weights["h2d"], "prefill_chunk_tokens": decided["prefill_chunk_tokens"]}
    return ("workload.context_tokens=0", *(f"force.{key}={value}" for key, value in keys.items()))


@dataclass
class Tree:
    """One version of the code, with a configuration of its own. Both trees' imports go on at once."""

    name: str
    root: Path
    work: Path
    found: dict[str, list[float]] = field(default_factory=dict)
    decided: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        package = "penstock." if (self.root / "penstock").is_dir() else ""
        path = os.pathsep.join([str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PENSTOCK_CONFIG_DIR": str(self.work / f"config-{self.name}"), "PYTHONPATH": path}
        self.warm = Warm({program: f"{package}{program}.cli" for program in ("planner", "runtime")}, env, self.work)

    def call(self, program: str, *arguments: str) -> dict:
        """Run a verb; the JSON document that ends its output. SystemExit with the end of its output where it fails."""
        begun = time.perf_counter()
        done = self.warm.run(program, arguments)
        if done.returncode:
            raise SystemExit(f"{self.name}: {program} {' '.join(arguments)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        print(f"  {self.name:4} {program} {arguments[0]}: {time.perf_counter() - begun:.1f} s", flush=True)
        return json.loads(done.stdout.strip().splitlines()[-1])

    def solve(self, name: str, case: Case, checkpoint: Path, like: Mapping | None = None) -> dict:
        """What this tree decides for ``case``: what ``like`` decided, where it is given."""
        keys = ("hardware=local", "model=hf", f"model.checkpoint={checkpoint}", f"out={name}-{self.name}.yaml", *case.solve)
        self.decided[name] = decided = self.call("planner", "solve", *keys, *(forced(like) if like else ()))["decided"]
        return decided

    def run(self, name: str, case: Case) -> dict[str, float]:
        out = self.work / f"{name}-{self.name}.json"
        self.call("runtime", "run", f"plan={name}-{self.name}.yaml", f"out={out}", f"limits={str(case.limits).lower()}")
        report = json.loads(out.read_text())
        return {f"{name}: {figure}": take(report) for figure, take in case.figures.items()}


def compare(name: str, case: Case, old: Tree, new: Tree, checkpoint: Path, pairs: int) -> Iterator[None]:
    """Run ``case`` ``pairs`` times with each tree, and stop after each pair; what they found is theirs to keep."""
    new.solve(name, case, checkpoint, old.solve(name, case, checkpoint))
    for k in range(pairs):
        for tree in (old, new) if k % 2 == 0 else (new, old):
            for figure, value in tree.run(name, case).items():
                tree.found.setdefault(figure, []).append(value)
                print(f"  {figure:24} {tree.name:4} {value:.5g}", flush=True)
        yield


def differing(old: Mapping, new: Mapping, at: str = "") -> list[str]:
    """The decisions of ``old`` that ``new`` took otherwise."""
    found: list[str] = []
    for key, value in old.items():
        theirs = new.get(key)
        if isinstance(value, Mapping) and isinstance(theirs, Mapping):
            found += differing(value, theirs, f"{at}{key}.")
        elif value != theirs:
            found.append(f"{at}{key}: {value}, {theirs}")
    return found


def rows(old: Tree, new: Tree) -> list[dict]:
    """A row a figure: the old code's median is the limit. Two plans that differ are no comparison of code, so such a row has no target;
    decisions that the old code does not know are no difference."""
    found = []
    for figure, before in old.found.items():
        case, what = figure.split(": ")
        after, same = new.found[figure], not differing(old.decided[case], new.decided[case])
        ratio = median(b / a for a, b in zip(before, after, strict=True))
        spread = median(abs(b / a - 1) for a, b in pairwise(before)) if len(before) > 1 else 0.0
        row = {"case": what, "what": f"{case}, {len(before)} pairs", "result": median(after), "limit": median(before), "unit": "s"}
        row |= {"ratio": ratio, "target": f"<= {max(MOST, 1 + spread):.3f}" if same else "", "predicted": None}
        found.append(row | {"old": before, "new": after, "old_to_old": spread})
    return found


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    where = Path(given.get("work", "bench-work")).resolve()
    where.mkdir(parents=True, exist_ok=True)
    old, new = (Tree(name, Path(given[name]).resolve(), where) for name in ("old", "new"))
    probe = ("planner", "probe", f"probe.path={where}", "probe.quick=true")
    profiles = [old.call(*probe), new.call(*probe, "probe.force=true")]
    asked = {name: CASES[name] for name in given.get("cases", "host").split(",")}
    document: dict[str, object] = {"machine": machine(profiles[1]), "pairs": int(given.get("pairs", 5))}
    for name, case in asked.items():
        checkpoint = where / "-".join(key.partition("=")[2] for key in case.model)
        if not checkpoint.exists():
            new.call("runtime", "synth", *case.model, f"out={checkpoint}")
            os.sync()
        for _ in compare(name, case, old, new, checkpoint, int(given.get("pairs", 5))):
            show(found := rows(old, new))
            if "out" in given:
                Path(given["out"]).write_text(json.dumps({**document, "rows": found}, indent=1) + "\n")
    for tree in (old, new):
        tree.warm.close()


def show(found: list[dict]) -> None:
    for row in found:
        plans = "" if row["target"] else "   the plans differ"
        print(f"{row['what']:20} {row['case']:34} new/old {row['ratio']:.4f}   old/old +-{row['old_to_old']:.4f}{plans}", flush=True)


if __name__ == "__main__":
    main()
