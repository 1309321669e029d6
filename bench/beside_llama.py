"""llama.cpp beside us on one machine: the same geometry, the same VRAM, in alternated runs (issues 19 and 20).

    python bench/beside_llama.py work=/dev/shm/penstock out=llama.json llama=DIR cases=dense        # one case a command
    python bench/beside_llama.py work=bench-work llama=DIR cases=dense,int4,batch,mixtral,gpt_oss model=demo layers=4 quick=true

`llama`: the directory of llama.cpp's programs, built for CUDA (bench/llama_programs.py). `dense`: 8B BF16, VRAM 6 GiB, a step and a prefill
of 2048 tokens. `int4`: ours in INT4 beside Q4_0, 2 GiB. `batch`: 8 and 16 sequences, or `sizes`. `mixtral`: 16 layers, 13 GiB, routed at
random, then with favourites; `gpt_oss`: 20 layers of the 120b, 8 GiB. `layers` and `vram` change them: 4 layers at 4 GiB and 12 layers at 6
GiB leave llama.cpp the same share.

Ours, theirs, ours: a line for each run when it ends, rows at the case's end. Of three runs' steps the median counts, of a dense model
where memory holds both files: on a machine that just began, a first run took 5 to 50 % longer than later ones. llama.cpp is given the
best of `peer_threads` (half, three quarters and all of the cores), of `-lm none` and its default, and as many layers in VRAM as the
budget holds, by VRAM that is measured (bench/llama_side.py). Its steps do not depend on routing, for experts stay where they are. Ours
do: each routing has a plan of its own, made of routings that an earlier run recorded (bench/hybrid_routed.py). Targets of dense steps:

    ours / theirs >= 0.92 * S / L
    S = GB/s of CPU and link together (bench/beside_rates.py)
    L = bytes that llama.cpp's CPU reads for a token / its seconds

Its file is removed when it has run, and ours before that where both do not fit into memory; `drop=true` removes ours at the end. Other keys
as in bench/hybrid.py.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row  # noqa: E402
from bench.gguf_synth import GgufModel, dense_gguf, gpt_oss_gguf, mixtral_gguf  # noqa: E402
from bench.hybrid import KEYS, LONG, SHORT, Point, parts_gbps  # noqa: E402
from bench.hybrid_routed import Routed  # noqa: E402
from bench.link import Bench  # noqa: E402
from bench.llama_programs import LlamaPrograms  # noqa: E402
from bench.llama_side import Best, LlamaSide  # noqa: E402
from bench.moe_routing import favour  # noqa: E402
from bench.probed import play  # noqa: E402
from bench.routed_worker import RoutedRun, measure_routed  # noqa: E402
from bench.worker import Measured, Trial, Worker, measure  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.common.measures import parse_bytes  # noqa: E402
from penstock.planner.contract.plan.plan import Plan  # noqa: E402

CASES = ("dense", "int4", "batch", "mixtral", "gpt_oss")
Run = TypeVar("Run")
PROGRAMS = ("llama-bench", "llama-batched-bench")
LEAST_SHARE = 0.92
"""Of what the faster memory would give."""
PREFILL_STEPS = 2
THEIR_STEPS = 24
"""Of llama.cpp at most: its steps do not change as a run goes on. Ours may, by what they take (docs/hybrid.md)."""
MOST_DRAM = 0.85
"""Of the memory, that both sides' files and what one of them loads may take."""


class BesideLlama:
    """The cases; ``given`` are the command's keys."""

    def __init__(self, bench: Bench, worker: Worker, profile: Mapping[str, Any], given: Mapping[str, str]):
        if "llama" not in given:
            raise UserError("llama: missing; give the directory of llama.cpp's programs, llama=DIR")
        self.given, self.dram_bytes = given, int(profile["dram_bytes"])
        self.hybrid = Routed(bench, worker, profile, given)
        self.programs = LlamaPrograms(Path(given["llama"]), self.hybrid.card)
        self._their_steps = min(self.hybrid.steps, THEIR_STEPS)
        self._most: dict[int, int] = {}
        """id of a plan -> the most VRAM that was measured of its runs."""
        for name in PROGRAMS:
            self.programs.program(name)
        usual = {max(1, self.hybrid.cores * share // 4) for share in (2, 3, 4)}
        self.threads = [int(n) for n in given["peer_threads"].split(",")] if "peer_threads" in given else sorted(usual)

    # ---- cases

    def dense(self) -> Iterator[Row]:
        yield from self._dense("8B BF16" if self.hybrid.model == "llama8b" else self.hybrid.model, "bf16", "6GiB", LONG)

    def int4(self) -> Iterator[Row]:
        yield from self._dense("INT4, Q4_0", "int4", "2GiB", 0)

    def _dense(self, case: str, form: str, usual_vram: str, prompt: int) -> Iterator[Row]:
        """A step, and a prompt of ``prompt`` tokens where it is not 0."""
        h, vram = self.hybrid, self.given.get("vram", usual_vram)
        prompt = prompt if h.card else min(prompt, SHORT)
        checkpoint = h.checkpoint(form)
        with h.dropped(checkpoint):
            step = h.solve(f"llama-{form}", checkpoint, vram=vram)
            whole = h.solve(f"llama-{form}-prefill", checkpoint, vram=vram, prompt=prompt) if prompt else None
            steps, prompts = [self._ours(step, checkpoint)], self._prefilled(whole, checkpoint)
            rates = h.rates(step)
            print(f"    CPU and link together: {parts_gbps(rates):.1f} GB/s", flush=True)
            config = json.loads((checkpoint / "config.json").read_text())
            model = dense_gguf(config, "BF16", "BF16") if form == "bf16" else dense_gguf(config, "Q4_0", "Q6_K")
            with self._theirs(model, f"llama-{form}.gguf", vram, checkpoint, lambda: h.checkpoint(form)) as side:
                theirs = side.step(self._their_steps)
                if checkpoint.exists():
                    steps.append(self._ours(step, checkpoint))
                prefilled = side.prefill(theirs.threads, prompt) if prompt else None
            steps.append(self._ours(step, checkpoint))
            prompts += self._prefilled(whole, checkpoint)
            read = side.layers(0).read_bytes(theirs.split) / 1e9 * theirs.tokens_s
            yield self._over(case, Point(step, steps), theirs, least(parts_gbps(rates), read), f"S {parts_gbps(rates):.0f}, L {read:.0f}")
            if whole is not None and prefilled is not None:
                yield self._prefill_row(case, Point(whole, prompts), prefilled, prompt)

    def batch(self) -> Iterator[Row]:
        h, vram = self.hybrid, self.given.get("vram", "6GiB")
        sizes = [int(size) for size in self.given.get("sizes", "8,16").split(",")]
        checkpoint = h.checkpoint()
        with h.dropped(checkpoint):
            plans = {size: h.solve(f"llama-batch{size}", checkpoint, vram=vram, batch=size) for size in sizes}
            runs = {size: [self._ours(plan, checkpoint)] for size, plan in plans.items()}
            model = dense_gguf(json.loads((checkpoint / "config.json").read_text()))
            with self._theirs(model, "llama-batch.gguf", vram, checkpoint, h.checkpoint) as side:
                theirs = side.batches(sizes, SHORT, self._their_steps)
            for size, plan in plans.items():
                runs[size].append(self._ours(plan, checkpoint))
                yield self._over(f"batch {size}", Point(plan, runs[size]), theirs[size], ">= 1")

    def mixtral(self) -> Iterator[Row]:
        """Random routing and, of the same files in place, routing with favourites, beside the same runs of llama.cpp."""
        h = self.hybrid
        make = h.mixtral_files
        path, vram = make(), self.given.get("vram", "13GiB")
        with h.dropped(path):
            plan = self._plan("llama-mixtral", path, vram)
            runs = [self._routed(plan, path, 0)]
            with self._theirs(mixtral_gguf(json.loads((path / "config.json").read_text())), "llama-mixtral.gguf", vram, path, make) as side:
                theirs = side.step(self._their_steps)
            runs += [self._routed(plan, path, seed) for seed in (1, 2)]
            yield self._routed_row("Mixtral, random routing", plan, runs, theirs, ">= 0.9")
            traces = h.bench.work / "mixtral-traces"
            shutil.rmtree(traces, ignore_errors=True)
            path.rename(traces)
            favour(traces, 0.6, 2, seed=0)
        with h.dropped(traces):
            plan = self._plan("llama-traces", traces, vram)
            again = [self._routed(plan, traces, seed) for seed in (0, 1)]
            yield self._routed_row("Mixtral, routed like traces", plan, again, theirs, ">= 1.1")

    def gpt_oss(self) -> Iterator[Row]:
        h, vram = self.hybrid, self.given.get("vram", "8GiB")
        path = h.gpt_oss_files()
        with h.dropped(path):
            plan = self._plan("llama-gpt-oss", path, vram)
            runs = [self._routed(plan, path, 0)]
            model = gpt_oss_gguf(json.loads((path / "config.json").read_text()))
            with self._theirs(model, "llama-gpt-oss.gguf", vram, path, h.gpt_oss_files) as side:
                theirs = side.step(self._their_steps)
            runs += [self._routed(plan, path, seed) for seed in (1, 2)]
            yield self._routed_row("gpt-oss", plan, runs, theirs, ">= 0.9")

    # ---- runs

    def _ours(self, plan: Plan, checkpoint: Path) -> Measured:
        found = self._measured(measure, plan, checkpoint, self.hybrid.steps, 0)
        rows = plan.decisions.batch
        print(f"    ours, batch {rows}: {rows / found.step_s:.4g} tok/s; prefill {found.prefill_s:.3f} s{self._vram(plan)}", flush=True)
        return found

    def _prefilled(self, plan: Plan | None, checkpoint: Path) -> list[Measured]:
        """Once, after one that does not count: a process's first loads kernels, and llama-bench leaves its own first out, too."""
        if plan is None:
            return []
        self._measured(measure, plan, checkpoint, PREFILL_STEPS, 0)
        found = self.hybrid.worker(measure, Trial(plan, checkpoint, PREFILL_STEPS, 0))
        print(f"    ours, prefill: {found.prefill_s:.4f} s{self._vram(plan)}", flush=True)
        return [found]

    def _plan(self, name: str, checkpoint: Path, vram: str) -> Plan:
        """For what ``checkpoint``'s routers choose."""
        return self.hybrid.solve(name, checkpoint, self.hybrid.routings(name, checkpoint, vram), vram=vram)

    def _routed(self, plan: Plan, checkpoint: Path, seed: int) -> RoutedRun:
        found = self._measured(measure_routed, plan, checkpoint, self.hybrid.steps, seed)
        print(f"    ours: {1 / found.step_s:.4g} tok/s, {found.missed:.0%} missed{self._vram(plan)}", flush=True)
        return found

    def _measured(self, how: Callable[[Trial], Run], plan: Plan, checkpoint: Path, steps: int, seed: int) -> Run:
        """In a process of its own, as theirs are: one that ran another plan may hold what is none of this one's."""
        self.hybrid.worker.close()
        with self.programs.used_since() as used:
            found: Run = self.hybrid.worker(how, Trial(plan, checkpoint, steps, seed))
        self._most[id(plan)] = max(used.most_bytes, self._most.get(id(plan), 0))
        return found

    def _vram(self, plan: Plan) -> str:
        """What our runs of it took, in words."""
        return f", VRAM {self._most[id(plan)] / 1e9:.2f} GB" if self.hybrid.card else ""

    @contextmanager
    def _theirs(self, model: GgufModel, name: str, vram: str, ours: Path, make: Callable[[], Path]) -> Iterator[LlamaSide]:
        """llama.cpp with its file there. Our files go before it is written, and are made again, where memory does not hold both."""
        budget = parse_bytes(vram) if self.hybrid.card else None
        ours_bytes = sum(file.stat().st_size for file in ours.rglob("*") if file.is_file())
        parted = parts(ours_bytes, model.nbytes, self.dram_bytes)
        if parted:
            print(f"    {ours.name}: removed while llama.cpp runs", flush=True)
            shutil.rmtree(ours)
        side = LlamaSide(self.programs, model, self.hybrid.bench.work / name, budget, self.threads)
        with side.written():
            yield side
        if parted:
            make()

    # ---- rows

    def _over(self, case: str, point: Point, theirs: Best, target: str, more: str = "") -> Row:
        mine = point.plan.decisions.batch / point.step_s
        what = "; ".join(filter(None, (f"{self.hybrid.where(point)}{self._vram(point.plan)}", str(theirs), more)))
        predicted = point.predicted("decode_s_per_token", point.step_s)
        return self.hybrid.row(f"{case} over llama.cpp", what, mine, theirs.tokens_s, "tok/s", target, point, predicted)

    def _prefill_row(self, case: str, point: Point, theirs: Best, prompt: int) -> Row:
        predicted = point.predicted("prefill_s", point.prefill_s)
        rates = prompt / point.prefill_s, theirs.tokens_s
        what = f"{self.hybrid.where(point)}{self._vram(point.plan)}; {theirs}"
        return self.hybrid.row(f"{case}, prefill {prompt} over llama.cpp", what, *rates, "tok/s", ">= 1", point, predicted)

    def _routed_row(self, case: str, plan: Plan, runs: Sequence[RoutedRun], theirs: Best, target: str) -> Row:
        step_s, missed = median(run.step_s for run in runs), fmean(run.missed for run in runs)
        predicted = plan.prediction.decode_s_per_token / step_s
        computed, copied = fmean(run.computed_gb for run in runs), fmean(run.copied_gb for run in runs)
        moved = f"{computed:.2f} GB on the CPU, {copied:.2f} copied, host {fmean(run.host_us for run in runs):.0f} us"
        what = f"{missed:.0%} missed, {plan.prediction.experts_missed_vram:.0%} planned, {moved}{self._vram(plan)}; {theirs}"
        return self.hybrid.row(f"{case} over llama.cpp", what, 1 / step_s, theirs.tokens_s, "tok/s", target, Point(plan, ()), predicted)


def least(both_gbps: float, theirs_gbps: float) -> str:
    """The target of a dense step: what llama.cpp would reach if it read at the rate of CPU and link together, less 8 %. None where its
    CPU reads nothing."""
    return f">= {LEAST_SHARE * both_gbps / theirs_gbps:.3f}" if theirs_gbps else ""


def parts(ours_bytes: int, theirs_bytes: int, dram_bytes: int) -> bool:
    """Whether our files must go while llama.cpp runs, which holds its file and, loaded without mmap, a copy of it."""
    return ours_bytes + 2 * theirs_bytes > MOST_DRAM * dram_bytes


if __name__ == "__main__":
    play(BesideLlama, CASES, "dense", (*KEYS, "llama", "peer_threads"))
