"""Simulated seconds beside a run's, without a GPU: the simulator's error, apart from that of the rates that it was given.

    python bench/simulate.py work=/data/penstock out=results.json repeats=3 cases=streamed,half,rolling,kept,chunks,batch,few,more

Makes random checkpoints of 1.2 and 1.5 GB under `work`, probes the machine, and runs every case in turns, `repeats` times. Cases of
experts are simulated with the routings of the same tokens, recorded before. Each row has simulated over measured twice: with the probed
profile, and with the rates that the run's own process measured beside it (limits=true: the SSD's with the plan's blocks and depth, and
what computing takes while nothing moves), so that a machine whose rates drift does not count as an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.keys import given_of, read_names, read_values  # noqa: E402
from bench.link import Bench, limit_of, machine  # noqa: E402
from bench.moe import SMALL, favoured  # noqa: E402
from planner.checkpoints.checkpoint import spec_from_checkpoint  # noqa: E402
from planner.errors import UserError  # noqa: E402
from planner.moe.experts import TRANSIT_SLOTS  # noqa: E402
from planner.moe.traces import read_trace  # noqa: E402
from planner.plan import Plan  # noqa: E402
from planner.planfile import read_plan  # noqa: E402
from planner.predict.stages import decode_compute_s, prefill_compute_s, ssd_gbps  # noqa: E402
from planner.simulate.act import Simulation  # noqa: E402
from planner.simulate.lanes import NS  # noqa: E402
from planner.simulate.routings import TracedRouting  # noqa: E402

CASES: Mapping[str, tuple[str, ...]] = {
    "streamed": ("force.cap_layers=3",),
    "half": ("force.cap_layers=12",),
    "rolling": ("force.policy=rolling", "force.cap_layers=8", "force.hwm_layers=12", "force.prefetch_distance=10"),
    "kept": ("force.cap_layers=23",),
    "chunks": ("force.cap_layers=6", "workload.prompt_tokens=512", "force.prefill_chunk_tokens=128"),
    "batch": ("force.cap_layers=6", "workload.batch=8", "workload.requests=8"),
}
"""Name -> overrides of `planner solve`."""
OF_EXPERTS: Mapping[str, int] = {"few": 2, "more": 4}
"""Name -> how many of a layer's 8 experts DRAM keeps."""
SAMPLED = "temperature=1.0"
"""Greedy tokens of random weights repeat."""
WORK = ("workload.prompt_tokens=128", "workload.new_tokens=25", "hardware.dram_bytes=6GB")
ROUNDS = 3
"""Of each run, one after the other: figures are medians over them."""
KEYS = ("work", "out", "repeats", "cases")


@dataclass(frozen=True)
class Row:
    """One phase of one run. Ratios are simulated over measured, ``closed`` the closed form's over measured."""

    case: str
    phase: str
    measured_s: float
    simulated: float
    own_rates: float
    closed: float


def rows_of(case: str, plan: Plan, report: dict, trace: Path | None = None) -> Iterator[Row]:
    """The run's prefill and step beside those of two simulations: medians, but means of steps that differ by what they miss."""
    typical = median if trace is None else fmean
    measured = {"prefill": report["measured"]["prefill_s"], "decode": typical(report["step_s"])}
    closed = {"prefill": report["predicted"]["prefill_s"], "decode": report["predicted"]["decode_s_per_token"]}
    given, own = (simulated(which, trace, typical) for which in (plan, with_own_rates(plan, report)))
    for phase, seconds in measured.items():
        yield Row(case, phase, seconds, given[phase] / seconds, own[phase] / seconds, closed[phase] / seconds)


def simulated(plan: Plan, trace: Path | None, typical: Callable[[Sequence[float]], float]) -> dict[str, float]:
    work = replace(plan.workload, requests=ROUNDS * plan.decisions.batch)
    routings = None if trace is None else TracedRouting(read_trace(trace, plan.model.experts.count), None)
    record = Simulation(replace(plan, workload=work), routings=routings).run().record
    return {"prefill": median(record.prefill_ns) / NS, "decode": typical(record.step_ns) / NS}


def with_own_rates(plan: Plan, report: dict) -> Plan:
    """``plan`` on a machine with the rates that the run's process measured."""
    hardware, work, made = plan.hardware, plan.workload, plan.decisions
    ssd, compute = made.weights.ssd, report["limits"]["compute"]
    read = limit_of(report, "ssd_gbps") / ssd_gbps(hardware, ssd.block_bytes, ssd.queue_depth)
    slower = compute["decode_s"] / decode_compute_s(hardware, plan.model, work, made.batch)
    hardware = replace(
        hardware,
        ssd_read=tuple(replace(p, gbps=p.gbps * read) for p in hardware.ssd_read),
        cpu_matvec_gbps=hardware.cpu_matvec_gbps / slower,
        layer_launch_s=hardware.layer_launch_s * slower,
    )
    chunk = made.prefill_chunk_tokens
    whole_s = prefill_compute_s(hardware, plan.model, work, made.batch, chunk)
    free = replace(hardware, cpu_dense_tflops=hardware.cpu_dense_tflops * 1e9)
    passes_s = prefill_compute_s(free, plan.model, work, made.batch, chunk)
    share = max(0.1, (compute["prefill_s"] - passes_s) / (whole_s - passes_s))
    return replace(plan, hardware=replace(hardware, cpu_dense_tflops=hardware.cpu_dense_tflops / share))


def show(rows: list[Row]) -> None:
    """Medians over the repeats, and how far they lie apart."""
    print(f"{'case':<10} {'phase':<8} {'measured':>10} {'closed':>8} {'simulated':>10} {'own rates':>10}   range of own rates")
    for case, phase in dict.fromkeys((row.case, row.phase) for row in rows):
        mine = [row for row in rows if (row.case, row.phase) == (case, phase)]
        own = [row.own_rates for row in mine]
        figures = [median(getattr(row, name) for row in mine) for name in ("measured_s", "closed", "simulated", "own_rates")]
        print(f"{case:<10} {phase:<8} {figures[0]:>9.4f}s {figures[1]:>8.3f} {figures[2]:>10.3f} {figures[3]:>10.3f}   "
              f"{min(own):.3f} to {max(own):.3f}")  # fmt: skip


def measure(bench: Bench, cases: tuple[str, ...], repeats: int) -> list[Row]:
    rows: list[Row] = []
    for _ in range(repeats):
        for case in cases:
            rows += run_case(bench, case)
            print(json.dumps([asdict(row) for row in rows[-2:]]), flush=True)
    return rows


def run_case(bench: Bench, case: str) -> Iterator[Row]:
    plan, rounds = bench.work / f"{case}.yaml", f"rounds={ROUNDS}"
    if case in CASES:
        report = bench.run(case, bench.checkpoint("demo", "model=demo"), [*WORK, *CASES[case]], [rounds])
        return rows_of(case, read_plan(plan), report)
    checkpoint, trace = moe_checkpoint(bench)
    experts = spec_from_checkpoint(checkpoint).experts
    slots = experts.units * OF_EXPERTS[case] // experts.count + TRANSIT_SLOTS
    report = bench.run(case, checkpoint, [*WORK, f"force.expert_dram_slots={slots}"], [rounds, SAMPLED])
    return rows_of(case, read_plan(plan), report, trace)


def moe_checkpoint(bench: Bench) -> tuple[Path, Path]:
    """A checkpoint of experts, and the routings of all runs of it: what they say does not depend on where experts lie. Recording takes
    time, so no run that is measured does it."""
    made, trace = favoured(bench, "moe-small", ["model=mixtral8x7b", *SMALL], 0.6, 2), bench.work / "moe-small.jsonl.gz"
    if not trace.exists():
        bench.run("record", made, [*WORK], [f"rounds={ROUNDS}", SAMPLED, f"moe.record={trace}"], limits=False)
    return made, trace


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
        if "work" not in given:
            raise UserError("work: missing; give a directory on the drive to measure, work=DIR")
        values = read_values(given, ("work", "out"), (), {"repeats": 1})
        cases = read_names(given, "cases", [*CASES, *OF_EXPERTS]).get("cases", (*CASES, *OF_EXPERTS))
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
