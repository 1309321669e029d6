"""Simulated seconds beside a run's, without a GPU: the simulator's error, apart from that of the rates that it was given.

    python bench/simulate.py work=/data/penstock out=results.json repeats=3
    python bench/simulate.py work=/data/penstock cases=streamed,few,random9

Makes random checkpoints of 1.2 and 1.5 GB under `work`, probes the machine, and runs every case in turns, `repeats` times; `randomN` are
plans drawn by the seed N. Cases of experts are simulated with the routings of the same tokens, recorded before. Each row has simulated over
measured three times: with the probed profile; with the rates that the stages of the run itself had (what `calibrate=true` writes back), so
that a machine whose rates drift does not count as an error; and with those of the same case's run before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.keys import given_of, read_names, read_values  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from bench.moe import SMALL, favoured  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint  # noqa: E402
from penstock.planner.contract.experts.expert_slots import fewest_slots  # noqa: E402
from penstock.planner.contract.experts.routing_files import read_routings  # noqa: E402
from penstock.planner.contract.given.figures import Figure  # noqa: E402
from penstock.planner.contract.lessons.corrections import slowed  # noqa: E402
from penstock.planner.contract.plan.plan import Plan  # noqa: E402
from penstock.planner.contract.plan.planfile import read_plan  # noqa: E402
from penstock.planner.simulate.act import Simulation  # noqa: E402
from penstock.planner.simulate.lanes.lanes import NS  # noqa: E402
from penstock.planner.simulate.routers import RecordedRouters  # noqa: E402

CASES: Mapping[str, tuple[str, ...]] = {
    "streamed": ("force.cap_layers=3",),
    "half": ("force.cap_layers=12",),
    "rolling": ("force.policy=rolling", "force.cap_layers=8", "force.hwm_layers=12", "force.prefetch_distance=10"),
    "kept": ("force.cap_layers=23",),
    "chunks": ("force.cap_layers=6", "workload.prompt_tokens=512", "force.prefill_chunk_tokens=128"),
    "batch": ("force.cap_layers=6", "workload.batch=8", "workload.requests=8"),
}
"""Name -> overrides of `planner solve`."""
RANDOM, DRAWN = "random", 6
"""Of drawn plans the name before their seed, and how many there are where no cases are given."""
OF_EXPERTS: Mapping[str, int] = {"few": 2, "more": 4}
"""Name -> how many of a layer's 8 experts DRAM keeps."""
SAMPLED = ("temperature=1.0", "top_k=0")
"""Greedy tokens of random weights repeat."""
WORK = ("workload.prompt_tokens=128", "workload.context_tokens=0", "workload.new_tokens=25", "hardware.dram_bytes=6GB", "calibration=off")
ROUNDS = 3
"""Of each run, one after the other: figures are medians over them."""
KEYS = ("work", "out", "repeats", "cases")


@dataclass(frozen=True)
class Row:
    """One phase of one run. Ratios are simulated over measured, ``closed`` the closed form's over measured; ``before`` is None for a case's
    first run."""

    case: str
    phase: str
    measured_s: float
    simulated: float
    own_rates: float
    before: float | None
    closed: float


def rows_of(case: str, plan: Plan, report: dict, earlier: dict | None, recorded: Path | None = None) -> Iterator[Row]:
    """The run's prefill and step beside those of simulations: medians, but means where passes differ by what they miss."""
    typical = median if recorded is None else fmean
    measured = {"prefill": typical(report["prefill_each_s"]), "decode": typical(report["step_s"])}
    closed = {"prefill": report["predicted"]["prefill_s"], "decode": report["predicted"]["decode_s_per_token"]}
    given, own = (simulated(which, recorded, typical) for which in (plan, as_taught(plan, report)))
    before = simulated(as_taught(plan, earlier), recorded, typical) if earlier else None
    for phase, seconds in measured.items():
        then = before[phase] / seconds if before else None
        yield Row(case, phase, seconds, given[phase] / seconds, own[phase] / seconds, then, closed[phase] / seconds)


def simulated(plan: Plan, recorded: Path | None, typical: Callable[[Sequence[float]], float]) -> dict[str, float]:
    work = replace(plan.workload, requests=ROUNDS * plan.decisions.batch)
    routers = None if recorded is None else RecordedRouters(read_routings(recorded, plan.model.experts.count), None)
    record = Simulation(replace(plan, workload=work), routers=routers).run().record
    return {"prefill": typical(record.prefill_ns) / NS, "decode": typical(record.step_ns) / NS}


def as_taught(plan: Plan, report: dict) -> Plan:
    """``plan`` on a machine with the rates that the run's stages had."""
    rates = report["calibration"]["of_profile"]
    return replace(plan, hardware=slowed(plan.hardware, {Figure(figure): 1 / rate for figure, rate in rates.items()}))


def drawn(seed: int) -> tuple[str, ...]:
    """Overrides of a random plan: how many layers DRAM holds, under which policy, how the prompt passes, how many sequences."""
    random = Random(seed)
    cap, batch, prompt = random.randint(3, 16), random.choice((1, 2, 4)), random.choice((64, 128, 256))
    work = (f"workload.batch={batch}", f"workload.requests={batch}", f"workload.prompt_tokens={prompt}")
    layers = (f"force.cap_layers={cap}",)
    if random.random() < 0.5:
        layers += ("force.policy=rolling", f"force.hwm_layers={cap + random.randint(3, 6)}", f"force.prefetch_distance={cap + 2}")
    return (*work, *layers, f"force.prefill_chunk_tokens={random.choice((prompt // 2, prompt))}")


def show(rows: list[Row]) -> None:
    """Medians over the repeats, and how far they lie apart."""
    print(f"{'case':<10} {'phase':<8} {'measured':>10} {'closed':>8} {'simulated':>10} {'own rates':>10} {'before':>8}   own: from, to")
    for case, phase in dict.fromkeys((row.case, row.phase) for row in rows):
        mine = [row for row in rows if (row.case, row.phase) == (case, phase)]
        own, before = [row.own_rates for row in mine], [row.before for row in mine if row.before is not None]
        figures = [median(getattr(row, name) for row in mine) for name in ("measured_s", "closed", "simulated")]
        then = f"{median(before):8.3f}" if before else "       -"
        print(f"{case:<10} {phase:<8} {figures[0]:>9.4f}s {figures[1]:>8.3f} {figures[2]:>10.3f} {median(own):>10.3f} {then}   "
              f"{min(own):.3f}, {max(own):.3f}")  # fmt: skip


def measure(bench: Bench, cases: tuple[str, ...], repeats: int) -> list[Row]:
    rows: list[Row] = []
    earlier: dict[str, dict] = {}
    for _ in range(repeats):
        for case in cases:
            plan, report, routings = run_case(bench, case)
            rows += rows_of(case, plan, report, earlier.get(case), routings)
            earlier[case] = report
            print(json.dumps([asdict(row) for row in rows[-2:]]), flush=True)
    return rows


def run_case(bench: Bench, case: str) -> tuple[Plan, dict, Path | None]:
    """The plan, what its run reports, and the routings of its tokens."""
    told, routings = [f"rounds={ROUNDS}", "calibrate=true"], None
    if case in OF_EXPERTS:
        checkpoint, routings = moe_checkpoint(bench)
        experts = spec_from_checkpoint(checkpoint).experts
        slots = experts.units * OF_EXPERTS[case] // experts.count + fewest_slots(experts)
        overrides, told = (f"force.expert_dram_slots={slots}",), [*told, *SAMPLED]
    else:
        checkpoint = bench.checkpoint("demo", "model=demo")
        overrides = drawn(int(case.removeprefix(RANDOM))) if case.startswith(RANDOM) else CASES[case]
    report = bench.run(case, checkpoint, [*WORK, *overrides], told, limits=False)
    return read_plan(bench.work / f"{case}.yaml"), report, routings


def moe_checkpoint(bench: Bench) -> tuple[Path, Path]:
    """A checkpoint of experts, and the routings of all runs of it: what they say does not depend on where experts lie. Recording takes
    time, so no run that is measured does it."""
    made, routings = favoured(bench, "moe-small", ["model=mixtral8x7b", *SMALL], 0.6, 2), bench.work / "moe-small.jsonl.gz"
    if not routings.exists():
        bench.run("record", made, [*WORK], [f"rounds={ROUNDS}", *SAMPLED, f"moe.record={routings}"], limits=False)
    return made, routings


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
        if "work" not in given:
            raise UserError("work: missing; give a directory on the drive to measure, work=DIR")
        values = read_values(given, ("work", "out"), (), {"repeats": 1})
        known = (*CASES, *OF_EXPERTS, *(f"{RANDOM}{seed}" for seed in range(10)))
        cases = read_names(given, "cases", known).get("cases", known[: len(CASES) + len(OF_EXPERTS) + DRAWN])
    except UserError as error:
        raise SystemExit(f"bench/simulate.py: {error}") from None
    bench = Bench(values["work"])
    where = machine(bench.probe())
    rows = measure(bench, cases, values.get("repeats", 3))
    show(rows)
    if "out" in values:
        document = {"machine": where, "rows": [asdict(row) for row in rows]}
        values["out"].write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
