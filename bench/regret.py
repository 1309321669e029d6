"""How good plans are: a plan against its neighbours, each run for real, in shuffled order.

    python bench/regret.py work=/data/penstock checkpoint=DIR budgets=6GiB:16GiB,6GiB:6GiB out=regret.json [repeats=3] [steps=8]
    python bench/regret.py work=bench-work budgets=:400MB,:600MB,:800MB out=regret.json          # without a GPU: DRAM alone

For each budget (VRAM:DRAM) the solver's plan, be it the fastest or the simple one, and that plan with one decision moved: cap, HWM,
distance, policy, residents, slots, block, depth, chunk, copies in flight, expert slots. Regret is the plan's step over the best one
measured; predicted over measured stands beside each point, their rank correlation and the spread of the repeats below. All points run in
one process, an engine each, medians over steps and repeats. Without a checkpoint the demo geometry of 1.2 GB is made.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.keys import given_of, read_values  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from planner.cost import predict  # noqa: E402
from planner.decisions import CachePolicy, Decisions  # noqa: E402
from planner.errors import UserError  # noqa: E402
from planner.force import Force  # noqa: E402
from planner.plan import Plan  # noqa: E402
from planner.planfile import read_plan  # noqa: E402
from planner.rules import broken_rules  # noqa: E402
from runtime.cuda import find_device, open_cuda  # noqa: E402
from runtime.engine import Engine, EngineOptions  # noqa: E402
from runtime.generate import Batch, Sampler, Sampling, generate  # noqa: E402
from runtime.model import import_model, open_skeleton  # noqa: E402
from runtime.prompts import random_ids  # noqa: E402

KEYS = ("work", "checkpoint", "budgets", "out", "repeats", "steps", "prompt", "seed")
WARM_UP = 2
"""Steps of each run that do not count."""
OURS = "the plan"


@dataclass
class Point:
    """A plan's decisions, one of them moved; ``steps_s`` has the median step of each repeat."""

    budget: str
    name: str
    plan: Plan
    steps_s: list[float] = field(default_factory=list)

    @property
    def predicted_s(self) -> float:
        return self.plan.predicted.decode_s_per_token

    @property
    def measured_s(self) -> float:
        return median(self.steps_s)


def moved(plan: Plan) -> Iterator[tuple[str, Force]]:
    """The plan's decisions one by one, each moved a little and a lot. What breaks a rule is left out by :func:`neighbours`."""
    w, layers = plan.decisions.weights, plan.model.layers
    cap, hwm, units = w.dram.cap_layers, w.dram.hwm_layers, w.vram.resident_units
    for value in {0, cap // 4, cap // 2, cap * 3 // 4, cap - 2, cap - 1, cap + 1, cap + 2, layers}:
        yield f"cap {value}", Force(cap_layers=value, hwm_layers=value + hwm - cap, prefetch_distance=value + hwm - cap)
    for value in {cap + 3, cap + 5, cap + 10}:
        yield f"HWM {value}", Force(hwm_layers=value, prefetch_distance=min(value, w.dram.prefetch_distance))
    yield f"distance {cap}", Force(prefetch_distance=cap)
    yield "rolling", Force(policy=CachePolicy.rolling)
    for name, kept in (("resident_attn", units.attn), ("resident_ffn", units.ffn)):
        for value in {0, kept // 2, kept - 1, kept + 1}:
            yield f"{name} {value}", Force(**{name: value})
    for value in {4, 6, 8, 12} if w.vram.slots else ():
        yield f"slots {value}", Force(vram_slots=value, vram_prefetch_distance=value - 2)
    for value in {w.ssd.block_bytes // 4, w.ssd.block_bytes * 4}:
        yield f"block {value >> 20} MiB", Force(block_bytes=value)
    for value in {1, w.ssd.queue_depth * 2}:
        yield f"depth {value}", Force(queue_depth=value)
    for value in {w.h2d.chunk_bytes // 8, w.h2d.chunk_bytes * 2} if plan.hardware.gpu else ():
        yield f"chunk {value >> 20} MiB", Force(chunk_bytes=value)
    for value in {1, 4} if plan.hardware.gpu else ():
        yield f"in flight {value}", Force(in_flight=value)
    if plan.decisions.experts is not None:
        slots = plan.decisions.experts
        for name, value in (("expert_vram_slots", slots.vram_slots), ("expert_dram_slots", slots.dram_slots)):
            for part in {value // 2, value * 3 // 4} if value else ():
                yield f"{name} {part}", Force(**{name: part})


def neighbours(budget: str, plan: Plan) -> list[Point]:
    """The plan and those of its neighbours that keep every rule, each set of decisions once."""
    points, seen = [Point(budget, OURS, plan)], {plan.decisions}
    for name, force in moved(plan):
        try:
            made: Decisions = force.apply(plan.decisions, plan.model.layers)
        except UserError:
            continue
        if made in seen or any(broken_rules(plan.hardware, plan.model, plan.workload, made)):
            continue
        seen.add(made)
        predicted = predict(plan.hardware, plan.model, plan.workload, made)
        points.append(Point(budget, name, replace(plan, decisions=made, predicted=predicted)))
    return points


def measure(plan: Plan, checkpoint: Path, steps: int, seed: int) -> float:
    """Seconds of a decode step: the median of ``steps``, after a prefill and some to warm up."""
    device = find_device(plan)
    copier = open_cuda(plan, device) if plan.hardware.gpu else None
    work = plan.workload
    prompts = random_ids(plan.decisions.batch, work.prompt_tokens, plan.model.vocab, seed)
    batch = Batch(prompts, steps + WARM_UP + 1, work.max_tokens, plan.decisions.prefill_chunk_tokens)
    with closing(Engine(plan, open_skeleton(checkpoint), copier, device, EngineOptions())) as engine:
        engine.load(batch, lambda *_: None)
        made = generate(engine.sequences(batch), batch, Sampler(Sampling(temperature=1.0, seed=seed), device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return median(made.step_s[WARM_UP:])


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: Pearson's of the ranks; equal values share the mean of theirs."""
    ranks = torch.tensor([[sorted(x).index(v) + (list(x).count(v) - 1) / 2 for v in x] for x in (a, b)], dtype=torch.float64)
    return torch.corrcoef(ranks)[0, 1].item()


def document(points: Sequence[Point], where: dict) -> dict:
    """Per budget the regret, the noise of the plan's own repeats and the rank correlation, then every point."""
    keys = ("budget", "name", "predicted_s", "measured_s", "steps_s")
    rows = [{key: getattr(point, key) for key in keys} for point in points]
    budgets = {}
    for budget in dict.fromkeys(p.budget for p in points):
        here = [p for p in points if p.budget == budget]
        ours, best = here[0], min(here, key=lambda p: p.measured_s)
        budgets[budget] = {
            "points": len(here),
            "notes": list(ours.plan.notes),
            "regret": ours.measured_s / best.measured_s,
            "best": best.name,
            "noise": (max(ours.steps_s) - min(ours.steps_s)) / ours.measured_s,
            "rank_correlation": correlation([p.predicted_s for p in here], [p.measured_s for p in here]),
            "predicted_over_measured": ours.predicted_s / ours.measured_s,
        }
    whole = correlation([p.predicted_s for p in points], [p.measured_s for p in points])
    return {"machine": where, "budgets": budgets, "rank_correlation": whole, "points": rows}


def show(made: dict) -> None:
    for row in made["points"]:
        spread = f"{min(row['steps_s']):.4f}-{max(row['steps_s']):.4f}"
        ratio = row["predicted_s"] / row["measured_s"]
        figures = f"{row['measured_s']:9.4f} s  {spread:16} predicted {row['predicted_s']:8.4f} {ratio:6.3f}"
        print(f"{row['budget']:16} {row['name']:22} {figures}")
    for budget, facts in made["budgets"].items():
        for note in facts["notes"]:
            print(f"{budget}: {note}")
        print(f"{budget}: regret {facts['regret']:.3f} (best: {facts['best']}), noise {facts['noise']:.3f}, {facts['points']} points, "
              f"rank correlation {facts['rank_correlation']:.3f}, predicted/measured {facts['predicted_over_measured']:.3f}")  # fmt: skip
    print(f"rank correlation of all {len(made['points'])} points: {made['rank_correlation']:.3f}")


def draw(points: Sequence[Point], path: Path) -> None:
    """Measured over predicted, both logarithmic, a colour for each budget, the plans as stars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 6))
    for colour, budget in enumerate(dict.fromkeys(p.budget for p in points)):
        here = [p for p in points if p.budget == budget]
        axes.scatter([p.predicted_s for p in here], [p.measured_s for p in here], s=18, color=f"C{colour}", label=budget)
        axes.scatter(here[0].predicted_s, here[0].measured_s, s=160, marker="*", color=f"C{colour}", edgecolors="black")
    both = [s for p in points for s in (p.predicted_s, p.measured_s)]
    axes.plot([min(both), max(both)], [min(both), max(both)], color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="predicted, s a step", ylabel="measured, s a step")
    axes.legend(title="VRAM:DRAM; stars: the plans", fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
        asked = {"repeats": 3, "steps": 8, "prompt": 128, "seed": 0} | read_values(given, ("checkpoint",), (), dict.fromkeys(
            ("repeats", "steps", "prompt", "seed"), 0))  # fmt: skip
    except UserError as error:
        raise SystemExit(str(error)) from None
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    where = machine(bench.probe())
    checkpoint = asked.get("checkpoint") or bench.checkpoint("demo", "model=demo")
    import_model(checkpoint)
    points: list[Point] = []
    for k, budget in enumerate(given.get("budgets", ":400MB,:600MB,:800MB").split(",")):
        sizes = dict(zip(("vram", "dram"), budget.split(":"), strict=True))
        keys = [f"hardware.{tier}_bytes={size}" for tier, size in sizes.items() if size]
        work = [f"workload.prompt_tokens={asked['prompt']}", f"workload.new_tokens={asked['steps'] + WARM_UP + 1}"]
        path = bench.work / f"regret-{k}.yaml"
        model = ["model=hf", f"model.checkpoint={checkpoint}", f"out={path}"]
        bench.call("planner", "solve", "hardware=local", *model, *keys, *work)
        points += neighbours(budget, read_plan(path))
    runs = [point for point in points for _ in range(asked["repeats"])]
    random.Random(asked["seed"]).shuffle(runs)
    print(json.dumps(where), flush=True)
    for number, point in enumerate(runs, 1):
        point.steps_s.append(measure(point.plan, checkpoint, asked["steps"], asked["seed"]))
        print(f"\r{number}/{len(runs)} {point.budget} {point.name:24}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    made = document(points, where)
    show(made)
    if "out" in given:
        Path(given["out"]).write_text(json.dumps(made, indent=1) + "\n")
        draw(points, Path(given["out"]).with_suffix(".png"))


if __name__ == "__main__":
    main()
