"""Steps computed where the bytes lie: each case beside streaming alone and beside the slowest of bus, CPU, link and chain.

    python bench/hybrid.py work=/dev/shm/penstock out=dense.json cases=dense        # one case a command: each makes its own files
    python bench/hybrid.py work=/dev/shm/penstock out=splits.json cases=splits splits=0,4,8,12,16,20,24,28,32
    python bench/hybrid.py work=bench-work cases=files,dense,prefill,batch,lossless,int4,splits,two model=demo layers=4   # without a card

`dense`: BF16, VRAM 6 GiB, batch 1. `kv`: 16 sequences of 8192 tokens, VRAM 24 GiB, KV mostly in DRAM. `prefill`: 2048 tokens. `batch`: 8
and 16, or those of `sizes`. `lossless`: beside BF16. `int4`: VRAM 2 GiB. `head`: BF16 and INT4 at 2 GiB, beside the plan with none of the
LM head on the CPU. `rows`: AWQ in F16 at 3 GiB, in the order of rows and as published. `seventy`: 70B at 16 GiB, for a host of 512 GB.
`splits`: `force.host_ffn` from 0 to all, or those of `splits`, each predicted and measured; what the plan's own choice lost to the best.
`reads`: DRAM of `dram`, so that each pass reads some layers from the drive; `drive`: GB/s that its reads are held to. `near`: a run that
moves a unit between link and CPU by its own steps (take steps=160). `ahead`: beside the plan whose threads read nothing ahead. `two`: the
plan for a CPU that was probed on two cores. `crowd`: other processes take the cores in the middle. `files`: makes the checkpoints of
`forms`, so that a case need not.

`model`, `layers`, `vram` change the geometry and the budget of the cases; `drop=true` removes the files of a case behind it. The first
command over a directory probes the machine, two minutes; `quick=true` leaves the CPU's products out, and with them all units of the CPU.
Models with routed experts: bench/hybrid_routed.py.

Plans of a case run in turns in one process, an engine each (bench/worker.py); medians over the steps of `pairs` turns behind one that
warms up. The same process then measures what each bound is made of (bench/beside_rates.py):

    bound = max(host bytes / CPU, copied bytes / link, all bytes / bus, chain)
    chain = resident step * (1 - host bytes / weights) + host bytes / CPU + hops

`resident step` is a step with all weights in VRAM, measured there, too.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.beside_rates import Rates, attention_rates, measure_rates  # noqa: E402
from bench.cases import Row  # noqa: E402
from bench.coded_synth import config_of, write_coded  # noqa: E402
from bench.crowd import Crowd, crowded_steps  # noqa: E402
from bench.held_host import held_drive, hold_drive  # noqa: E402
from bench.link import Bench  # noqa: E402
from bench.probed import play, probe  # noqa: E402
from bench.worker import Measured, Trial, Worker, measure  # noqa: E402
from penstock.planner.contract.decided.decisions import Tier  # noqa: E402
from penstock.planner.contract.plan.plan import Plan  # noqa: E402
from penstock.planner.contract.plan.planfile import read_plan  # noqa: E402

KEYS = ("work", "out", "cases", "model", "layers", "vram", "steps", "pairs", "sizes", "splits", "forms", "drop", "quick", "dram", "drive")
STREAMED = ("force.host_attention=0",)
ATTENDED = 16, 8192
"""Sequences, and tokens of each, of issue 20's case."""
ALONE = ("force.host_ffn=0",)
"""Nothing is computed by the CPU: all that VRAM does not keep streams."""
SHORT, LONG = 128, 2048
"""Tokens of a prompt: behind which steps are measured, and that is measured itself."""
WHOLE = "whole"
"""All VRAM that the card has."""
CROWDED_STEPS = 240
"""More than it takes to come back: the plan's schedule is tried again 64 steps behind the one that left it."""
BUSY_S, SHORT_S = 1.5, 0.3
"""Of each rate, with and without a card."""
FEW, MANY = 16, 32
"""Cores of the hosts that issue 20 names."""
MOST_LEFT = 1.08
PACKED = {"lossless": "bf16", "rows": "awq"}
"""Forms that `runtime pack` makes -> of which."""


@dataclass(frozen=True)
class Point:
    """A plan and what its runs took."""

    plan: Plan
    runs: Sequence[Measured]

    @property
    def step_s(self) -> float:
        return median(run.step_s for run in self.runs)

    @property
    def prefill_s(self) -> float:
        return median(run.prefill_s for run in self.runs)

    @property
    def host_gbps(self) -> float:
        """Of the CPU beside the card, while it computes."""
        return median(run.host_gbps for run in self.runs)

    @property
    def host_gb(self) -> float:
        """Of a step, read by the CPU's products."""
        placed = self.plan.placement
        return sum(placed.unit_bytes(u) for u in placed.host_units) / 1e9

    @property
    def copied_gb(self) -> float:
        """Of a step, over the link."""
        placed = self.plan.placement
        return sum(placed.unit_bytes(u) for u in placed.step_units) / 1e9

    def predicted(self, key: str, measured: float) -> float:
        return getattr(self.plan.prediction, key) / measured


class Hybrid:
    """The cases over one geometry; ``given`` are the command's keys."""

    def __init__(self, bench: Bench, worker: Worker, profile: Mapping, given: Mapping[str, str]):
        self.bench, self.worker, self.profile, self.given = bench, worker, profile, given
        self.card, self.cores = bool(profile["gpu"]), int(profile["cpu"]["cores"])
        self.model, self.layers = given.get("model", "llama8b"), given.get("layers")
        self.vram = given.get("vram", "6GiB")
        self.steps, self.pairs = int(given.get("steps", "24")), int(given.get("pairs", "2"))

    # ---- checkpoints

    def checkpoint(self, form: str = "bf16", model: str | None = None, layers: str | None = None) -> Path:
        """Of ``form``, made once."""
        model, layers = model or self.model, layers or self.layers
        path = self.bench.work / "-".join(filter(None, (model, layers, form)))
        if path.exists():
            return path
        if form == "bf16":
            return self.bench.checkpoint(path.name, f"model={model}", *([f"model.layers={layers}"] if layers else []))
        if form in PACKED:
            given = self.checkpoint(PACKED[form], model, layers)
            self.bench.call("runtime", "pack", f"checkpoint={given}", f"out={path}", f"format={form}")
            return path
        write_coded(form, config_of(model, int(layers) if layers else None), path)
        return path

    def files(self) -> Iterator[Row]:
        for form in self.given.get("forms", "bf16").split(","):
            begun = time.perf_counter()
            path = self.checkpoint(form)
            gb = sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) / 1e9
            seconds = time.perf_counter() - begun
            yield Row("files", path.name, gb / seconds, gb, "GB/s", seconds, "", None, 0, 0)

    @contextmanager
    def dropped(self, *paths: Path) -> Iterator[None]:
        """Behind it ``paths`` are gone, with ``drop=true``: 46 GB twice and an arena do not fit into a host's memory."""
        try:
            yield
        finally:
            for path in paths if self.given.get("drop") == "true" else ():
                shutil.rmtree(path, ignore_errors=True)

    # ---- plans and runs

    def solve(self, name: str, checkpoint: Path, *keys: str, vram: str = "", prompt: int = SHORT, batch: int = 1, new: int = 0) -> Plan:
        path = self.bench.work / f"hybrid-{name}.yaml"
        asked = {"prompt_tokens": prompt, "new_tokens": (new or self.steps) + 2, "context_tokens": 0, "batch": batch, "requests": batch}
        budget = [f"hardware.vram_bytes={vram or self.vram}"] if self.card and vram != WHOLE else []
        given = ["hardware=local", "ranks=1", "model=hf", f"model.checkpoint={checkpoint}", f"out={path}", *budget]
        self.bench.call("planner", "solve", *given, *(f"workload.{key}={value}" for key, value in asked.items()), *keys)
        return read_plan(path)

    def both(self, name: str, checkpoint: Path, vram: str = "", prompt: int = SHORT, batch: int = 1) -> tuple[Point, Point]:
        """The plan as it is solved and streaming alone, in turns."""
        asked = {"vram": vram, "prompt": prompt, "batch": batch}
        plans = [self.solve(f"{name}-{what}", checkpoint, *keys, **asked) for what, keys in (("plan", ()), ("alone", ALONE))]
        plan, alone = self.in_turns(checkpoint, plans)
        return plan, alone

    def in_turns(self, checkpoint: Path, plans: Sequence[Plan], seed: int = 0) -> list[Point]:
        """Each of ``plans`` run ``pairs`` times, in an order of its own each time, behind one run of the first that warms up."""
        runs: list[list[Measured]] = [[] for _ in plans]
        self.run(plans[0], checkpoint)
        draw = Random(seed)
        for _ in range(self.pairs):
            for k in draw.sample(range(len(plans)), len(plans)):
                runs[k].append(self.run(plans[k], checkpoint))
        return [Point(plan, each) for plan, each in zip(plans, runs, strict=True)]

    def run(self, plan: Plan, checkpoint: Path) -> Measured:
        return self.worker(measure, Trial(plan, checkpoint, self.steps, 0))

    def rates(self, plan: Plan) -> Rates:
        """Of the process in which plans run."""
        formats = {plan.placement.spec(unit).format.name for unit in plan.placement.host_units}
        threads = plan.hardware.host.threads_of(plan.model.ffn_formats) if plan.hardware.host else self.cores
        return self.worker(measure_rates, sorted(formats) or ["BF16"], threads, BUSY_S if self.card else SHORT_S)

    def resident_s(self, checkpoint: Path, batch: int = 1, prompt: int = SHORT) -> float:
        """A step with all weights in VRAM; without a card, in DRAM."""
        plan = self.solve("resident", checkpoint, vram=WHOLE, batch=batch, prompt=prompt)
        if self.card and plan.placement.streamed_units:
            raise SystemExit(f"{checkpoint.name}: does not fit into the card's memory as a whole, so that no chain can be measured")
        return median(self.run(plan, checkpoint).step_s for _ in range(2))

    # ---- rows

    def row(self, case: str, what: str, result: float, limit: float, unit: str, target: str, point: Point, predicted: float | None) -> Row:
        said = point.plan.prediction
        return Row(case, what, result, limit, unit, result / limit, target, predicted, said.vram_bytes / 1e9, said.dram_bytes / 1e9)

    def bound_rows(self, case: str, plan: Point, rates: Rates, resident_s: float) -> Iterator[Row]:
        """The step over its bound; what the CPU and the link carried together; the CPU's product over a plain read."""
        format_gbps = rates.cpu_gbps[self._format(plan)]
        placed = plan.plan.placement
        cpu_s = sum(placed.unit_bytes(u) / 1e9 / rates.cpu_gbps[placed.spec(u).format.name] for u in placed.host_units)
        weights_gb = plan.plan.model.weight_bytes / 1e9
        host = plan.plan.hardware.host
        hops = len(plan.plan.placement.host_units) * host.hop_s if host else 0.0
        parts = {
            "CPU": cpu_s,
            "link": plan.copied_gb / rates.link_gbps if rates.link_gbps else 0.0,
            "bus": (plan.copied_gb + plan.host_gb) / rates.bus_gbps(self._format(plan)),
            "chain": resident_s * (1 - plan.host_gb / weights_gb) + cpu_s + hops,
        }
        slowest = max(parts, key=parts.__getitem__)
        what = f"{self.where(plan)}; bound by {slowest}: " + ", ".join(f"{name} {s * 1e3:.1f}" for name, s in parts.items()) + " ms"
        predicted = plan.predicted("decode_s_per_token", plan.step_s)
        yield self.row(f"{case} over its bound", what, plan.step_s, parts[slowest], "s", f"<= {MOST_LEFT}", plan, predicted)
        carried = (plan.copied_gb + plan.host_gb) / plan.step_s
        yield self.row(f"{case}, CPU and link", "beside what they carry together", carried, parts_gbps(rates), "GB/s", "", plan, None)
        yield self.row(f"{case}, the CPU's product", "beside a plain read", format_gbps, rates.read_gbps, "GB/s", ">= 0.9", plan, None)

    def _format(self, point: Point) -> str:
        """Of the host units; where there are none, any that was measured."""
        return next((str(point.plan.placement.spec(u).format.name) for u in point.plan.placement.host_units), "BF16")

    def where(self, point: Point) -> str:
        placed = point.plan.placement
        return f"{len(placed.host_units)} units on the CPU, {len(placed.step_units)} copied"

    # ---- cases

    def dense(self) -> Iterator[Row]:
        checkpoint = self.checkpoint()
        with self.dropped(checkpoint):
            yield from self._beside("8B BF16" if self.model == "llama8b" else self.model, "dense", checkpoint, "")

    def int4(self) -> Iterator[Row]:
        checkpoint = self.checkpoint("int4")
        with self.dropped(checkpoint):
            yield from self._beside("INT4", "int4", checkpoint, self.given.get("vram", "2GiB"))

    def head(self) -> Iterator[Row]:
        """Where VRAM has no room for the LM head: the CPU computes blocks of it, or the card all."""
        for form in ("bf16", "int4"):
            checkpoint, vram = self.checkpoint(form), self.given.get("vram", "2GiB")
            with self.dropped(checkpoint):
                keys = (("plan", ()), ("none", ("force.host_head=0",)))
                plan, none = self.in_turns(
                    checkpoint, [self.solve(f"head-{form}-{what}", checkpoint, *more, vram=vram) for what, more in keys]
                )
                said = none.predicted("decode_s_per_token", none.step_s)
                what = f"{plan.plan.decisions.weights.host.head} blocks, {self.where(plan)}; without predicted/measured {said:.3f}"
                predicted = plan.predicted("decode_s_per_token", plan.step_s)
                yield self.row(
                    f"{form}, head on the CPU over none", what, 1 / plan.step_s, 1 / none.step_s, "tok/s", ">= 1.05", plan, predicted
                )

    def rows(self) -> Iterator[Row]:
        """AWQ in F16 as it is published, and with its numbers in the order of rows: one after the other, each as it is solved."""
        points, vram = [], self.given.get("vram", "3GiB")
        for form in ("awq", "rows"):
            checkpoint = self.checkpoint(form)
            points += self.in_turns(checkpoint, [self.solve(f"rows-{form}", checkpoint, vram=vram)])
            self.worker.close()  # kernels of one form would be found in the other's context
        published, turned = points
        said = published.predicted("decode_s_per_token", published.step_s)
        what = f"{self.where(turned)}, published {self.where(published)}, predicted/measured {said:.3f}"
        predicted = turned.predicted("decode_s_per_token", turned.step_s)
        yield self.row("AWQ by rows over as published", what, 1 / turned.step_s, 1 / published.step_s, "tok/s", ">= 1", turned, predicted)

    def ahead(self) -> Iterator[Row]:
        """What threads read ahead while they wait, over waiting alone."""
        checkpoint = self.checkpoint()
        with self.dropped(checkpoint):
            keys = (("plan", ()), ("none", ("hardware.host.ahead_bytes=0",)))
            plan, none = self.in_turns(checkpoint, [self.solve(f"ahead-{what}", checkpoint, *more) for what, more in keys])
            said = none.predicted("decode_s_per_token", none.step_s)
            what = f"{self.where(plan)}; none: {self.where(none)}, predicted/measured {said:.3f}"
            predicted = plan.predicted("decode_s_per_token", plan.step_s)
            yield self.row("reading ahead over none", what, plan.step_s, none.step_s, "s", "<= 1", plan, predicted)

    def seventy(self) -> Iterator[Row]:
        checkpoint = self.checkpoint(model="llama70b" if self.card else self.model)
        with self.dropped(checkpoint):
            plan, alone = self.both("seventy", checkpoint, self.given.get("vram", "16GiB"))
            yield self._faster("70B BF16", plan, alone, ">= 1.8")

    def reads(self) -> Iterator[Row]:
        """DRAM holds most layers, and each pass reads the others from the drive."""
        checkpoint = self.checkpoint()
        with self.dropped(checkpoint), self._drive() as drive:
            machine = [f"hardware.dram_bytes={self.given.get('dram', '34GiB')}", *drive]
            plans = [self.solve(f"reads-{what}", checkpoint, *machine, *keys) for what, keys in (("plan", ()), ("alone", ALONE))]
            plan, alone = self.in_turns(checkpoint, plans)
            rates = (median(getattr(run, one) for run in plan.runs) for one in ("host_gbps", "ssd_gbps"))
            read = "{} layers from the drive, CPU {:.0f} and reads {:.1f} GB/s".format(len(plan.plan.placement.ssd_layers), *rates)
            yield self._faster(f"{self.model}, {read}", plan, alone, ">= 1")

    @contextmanager
    def _drive(self) -> Iterator[list[str]]:
        """What a plan is told of the drive, as `drive` holds it. A process that has read before, or reads for other cases, is not held."""
        gbps = float(self.given.get("drive", "0"))
        if not gbps:
            yield []
            return
        self.worker.close()
        self.worker(hold_drive, gbps)
        try:
            yield held_drive(self.profile, gbps)
        finally:
            self.worker.close()

    def _beside(self, case: str, name: str, checkpoint: Path, vram: str) -> Iterator[Row]:
        plan, alone = self.both(name, checkpoint, vram)
        target = ">= 2.2" if self.cores >= MANY else ">= 1.7" if self.cores >= FEW else ">= 1"
        yield self._faster(case, plan, alone, target)
        yield from self.bound_rows(case, plan, self.rates(plan.plan), self.resident_s(checkpoint))

    def _faster(self, case: str, plan: Point, alone: Point, target: str) -> Row:
        """Tokens a second over those of streaming alone."""
        rates = [point.plan.decisions.batch / point.step_s for point in (plan, alone)]
        said = alone.predicted("decode_s_per_token", alone.step_s)
        what = f"{self.where(plan)}; alone predicted/measured {said:.3f}"
        predicted = plan.predicted("decode_s_per_token", plan.step_s)
        return self.row(f"{case} over streaming alone", what, *rates, "tok/s", target, plan, predicted)

    def near(self) -> Iterator[Row]:
        """A run that may move a unit between link and CPU by what its steps take, over one that follows the plan alone, in turns."""
        checkpoint = self.checkpoint()
        plans = [self.solve(f"near-{units}", checkpoint, f"force.host_near={units}") for units in (1, 0)]
        moved, alone = self.in_turns(checkpoint, plans)
        what, predicted = self.where(alone), alone.predicted("decode_s_per_token", alone.step_s)
        yield self.row("near the plan over the plan", what, 1 / moved.step_s, 1 / alone.step_s, "tok/s", ">= 1", moved, predicted)

    def prefill(self) -> Iterator[Row]:
        """2048 tokens as the hybrid plan runs them, over streaming alone."""
        plan, alone = self.both("prefill", self.checkpoint(), prompt=LONG if self.card else SHORT)
        what, predicted = self.where(plan), plan.predicted("prefill_s", plan.prefill_s)
        yield self.row("prefill over streaming alone", what, plan.prefill_s, alone.prefill_s, "s", "<= 1.02", plan, predicted)

    def batch(self) -> Iterator[Row]:
        for size in map(int, self.given.get("sizes", "8,16").split(",")):
            plan, alone = self.both(f"batch{size}", self.checkpoint(), batch=size)
            yield self._faster(f"batch {size}", plan, alone, ">= 1")

    def kv(self) -> Iterator[Row]:
        """Sequences whose KV lies mostly in DRAM, all weights in VRAM: the CPU attends to some of it, beside streaming all of it. Behind
        that the CPU's attention alone, over a plain read."""
        checkpoint, (count, tokens) = self.checkpoint(), ATTENDED if self.card else (2, SHORT)
        layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
        keys = ["workload.kv_spill=true", *([f"force.resident_{kind}={layers}" for kind in ("attn", "ffn")] if self.card else ())]
        asked = {"vram": self.given.get("vram", "24GiB"), "prompt": tokens, "batch": count}
        plans = [self.solve(f"kv-{what}", checkpoint, *keys, *more, **asked) for what, more in (("plan", ()), ("alone", STREAMED))]
        plan, alone = self.in_turns(checkpoint, plans)
        host, said = plan.plan.decisions.kv, alone.predicted("decode_s_per_token", alone.step_s)
        outside = 1 - host.vram_pages / host.pages
        attended = f"CPU attends to {host.host_layers} layers at {plan.host_gbps:.1f} GB/s"
        what = f"{outside:.0%} of KV in DRAM, {attended}; alone pred/meas {said:.3f}"
        rates, predicted = [count / point.step_s for point in (plan, alone)], plan.predicted("decode_s_per_token", plan.step_s)
        yield self.row("KV over streaming it", what, *rates, "tok/s", ">= 1.4", plan, predicted)
        prefill = plan.predicted("prefill_s", plan.prefill_s)
        yield self.row("  prefill", "over streaming alone", plan.prefill_s, alone.prefill_s, "s", "<= 1.02", plan, prefill)
        threads = plan.plan.hardware.host.threads_of(plan.plan.model.ffn_formats) if plan.plan.hardware.host else self.cores
        read, attended = self.worker(attention_rates, threads, count, tokens, BUSY_S if self.card else SHORT_S)
        yield self.row("  attention on the CPU", f"{threads} threads, over a plain read", attended, read, "GB/s", ">= 0.9", plan, None)

    def lossless(self) -> Iterator[Row]:
        """Tokens a second over BF16's, both as they are solved."""
        points = []
        for form in ("bf16", "lossless"):
            checkpoint = self.checkpoint(form)
            points += self.in_turns(checkpoint, [self.solve(f"lossless-{form}", checkpoint)])
        plain, coded = points
        predicted = coded.predicted("decode_s_per_token", coded.step_s)
        yield self.row("lossless over BF16", self.where(coded), 1 / coded.step_s, 1 / plain.step_s, "tok/s", ">= 1.25", coded, predicted)

    def splits(self) -> Iterator[Row]:
        """Each forced split, predicted and measured; last, what the plan's own choice lost to the best of them."""
        checkpoint = self.checkpoint()
        own = self.solve("own", checkpoint)
        layers = own.model.layers
        most = sum(tier is Tier.dram for tier in own.placement.ffn) if self.card else 0
        steps = [int(n) for n in self.given["splits"].split(",")] if "splits" in self.given else range(0, most + 1, max(1, layers // 8))
        plans = [self.solve(f"split{n}", checkpoint, f"force.host_ffn={n}") for n in steps if n <= most]
        chosen_, *others = self.in_turns(checkpoint, [own, *plans])
        for point in (chosen_, *others):
            predicted = point.predicted("decode_s_per_token", point.step_s)
            name = "the plan's own" if point is chosen_ else f"host_ffn={point.plan.decisions.weights.host.ffn}"
            off = max(predicted, 1 / predicted)
            yield replace(self.row(f"split, {name}", self.where(point), point.step_s, 1.0, "s", "<= 1.075", point, predicted), ratio=off)
        best = min((chosen_, *others), key=lambda p: p.step_s)
        yield self.row("regret of the plan's split", self.where(best), chosen_.step_s, best.step_s, "s", "<= 1.03", chosen_, None)

    def two(self) -> Iterator[Row]:
        """The machine probed again on two of its cores: the plan must be that of streaming alone, so that its runs differ from it by
        nothing but themselves."""
        usual, config = os.sched_getaffinity(0), self.bench.work / "config" / "hardware" / "local.yaml"
        kept = config.read_bytes()
        try:
            os.sched_setaffinity(0, sorted(usual)[:2])
            probe(self.bench, self.given.get("quick", "false"))
            checkpoint = self.checkpoint()
            plans = [self.solve(f"two-{what}", checkpoint, *keys) for what, keys in (("plan", ()), ("alone", ALONE))]
        finally:
            os.sched_setaffinity(0, usual)
            config.write_bytes(kept)
        same = float(plans[0].decisions == plans[1].decisions)
        plan, alone = self.in_turns(checkpoint, plans)
        yield self.row("two cores: the plan streams alone", self.where(plan), same, 1.0, "", "= 1", plan, None)
        yield self.row("two cores, step", "over streaming alone", plan.step_s, alone.step_s, "s", "<= 1.01", plan, None)

    def crowd(self) -> Iterator[Row]:
        """Twice as many busy processes as cores come behind a third of the steps and go behind two thirds: the steps before they go over
        streaming alone's, which meets them, too, and the last steps over those before they came."""
        checkpoint, steps = self.checkpoint(), CROWDED_STEPS if self.card else 3 * self.steps
        crowd = Crowd(2 * self.cores, steps // 6, steps // 2)
        last = max(2, steps // 20)
        plans = [self.solve(f"crowd-{what}", checkpoint, *keys, new=steps) for what, keys in (("plan", ()), ("alone", ALONE))]
        met, alone = (self.worker(crowded_steps, Trial(plan, checkpoint, steps, 0), crowd) for plan in plans)
        before, beside, behind = (slice(max(0, at - last), at) for at in (crowd.since - 1, crowd.until - 1, steps))
        point = Point(plans[0], ())
        during, others = median(met[beside]), median(alone[beside])
        yield self.row("crowded cores", f"{self.where(point)}; over streaming alone", during, others, "s", "<= 1.1", point, None)
        freed, usual = median(met[behind]), median(met[before])
        yield self.row("cores given back", "over steps before", freed, usual, "s", "<= 1.05", point, None)


CASES = (
    "files",
    "dense",
    "kv",
    "prefill",
    "batch",
    "lossless",
    "int4",
    "head",
    "rows",
    "seventy",
    "splits",
    "near",
    "reads",
    "ahead",
    "two",
    "crowd",
)


def parts_gbps(rates: Rates) -> float:
    """CPU and link at once, the most of the formats that were measured."""
    return max(rates.bus_gbps(format) for format in rates.cpu_gbps)


if __name__ == "__main__":
    play(Hybrid, CASES, "dense", KEYS)
