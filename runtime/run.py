"""`runtime run`: execute a plan on a checkpoint, and say what it did and where the plan was wrong."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from rich.console import Console

from runtime.cuda import measured_vram_bytes, open_cuda
from runtime.engine import Engine, EngineOptions
from runtime.generate import Batch, Generation, Sampler, Sampling, Sequences, generate
from runtime.job import Job, prepare
from runtime.limits import measure_limits
from runtime.memory import PeakDram
from runtime.model import open_skeleton
from runtime.order import Order
from runtime.progress import PhaseBar
from runtime.report import Outcome, make_report, show, write_report
from runtime.schema import RunConfig, Validation
from runtime.stages import StageClock
from runtime.startup import Startup
from runtime.validate import broken_at_run_time, compare_logits, load_unstreamed


@dataclass
class _Streamed:
    """The streamed part of a run, over before anything is validated."""

    generations: list[Generation]
    load_s: float
    clock: StageClock
    dram_bytes: int
    vram_bytes: int
    engine: dict[str, Any]
    rules_broken: list[str]


def run(cfg: RunConfig, order: Order) -> None:
    """Execute ``order``: texts, tables and one JSON line on stdout, the report in ``order.out``."""
    transformers.utils.logging.disable_progress_bar()
    console = Console(highlight=False)
    job = prepare(cfg, order)
    for note in dict.fromkeys([*job.plan.notes, *cfg.notes]):
        console.print(f"note: {note}", style="dim", markup=False)
    with PhaseBar() as bar:
        streamed = _stream(job, cfg, console, bar)
        logits = _validate(job, streamed.generations[0], bar) if cfg.validate is Validation.full else None
    outcome = Outcome(
        job=job,
        generations=streamed.generations,
        load_s=streamed.load_s,
        clock=streamed.clock,
        dram_bytes=streamed.dram_bytes,
        vram_bytes=streamed.vram_bytes,
        engine=streamed.engine,
        rules_broken=streamed.rules_broken,
        logits=logits,
    )
    report = make_report(outcome)
    write_report(report, order.out)
    show(console, outcome, report, order.out)


def _stream(job: Job, cfg: RunConfig, console: Console, bar: PhaseBar) -> _Streamed:
    say = (lambda line: console.print(f"[penstock] {line}", markup=False)) if cfg.verbose else None
    startup = Startup()
    startup.mark("imports")
    skeleton = open_skeleton(job.checkpoint)
    startup.mark("skeleton")
    copier = open_cuda(job.plan, job.device)
    startup.mark("cuda")
    peak = PeakDram()
    options = EngineOptions(wrap_around=cfg.engine.wrap_around, skip_preload_wait=cfg.engine.skip_preload_wait)
    with closing(Engine(job.plan, skeleton, copier, job.device, options, say)) as engine:
        startup.mark("arena")
        clock = StageClock(engine)
        limits = {}
        if cfg.limits:
            limits["before"] = measure_limits(engine)
            clock.book("limits")
            startup.skip()
        engine.load(next(job.batches()), bar)
        if copier is not None:
            peak.leave_out_cuda(engine.arena.nbytes)
        clock.book("load")
        startup.mark("load")
        sampler = Sampler(Sampling(cfg.temperature, cfg.top_p, cfg.seed), engine.device)
        generations = [_generate(job, cfg, engine, sampler, batch, clock, bar) for batch in job.batches()]
        dram_bytes, vram_bytes = peak.peak_bytes(), measured_vram_bytes(job.plan, job.device)
        facts = engine.facts()
        if cfg.limits:
            engine.stop()
            limits["after"] = measure_limits(engine)
        broken = broken_at_run_time(job.plan, engine.dram.cache.stats, dram_bytes, vram_bytes)
        startup.add("prefill", generations[0].prefill_s + generations[0].first_token_s)
        load_s = startup.seconds["arena"] + startup.seconds["load"]
        facts |= {"limits": limits, "start_s": startup.seconds}
        return _Streamed(generations, load_s, clock, dram_bytes, vram_bytes, facts, broken)


def _generate(
    job: Job, cfg: RunConfig, engine: Engine, sampler: Sampler, batch: Batch, clock: StageClock, bar: PhaseBar
) -> Generation:
    def progress(phase: str, done: int, total: int) -> None:
        if phase == "decode" and done == 1:
            clock.book("prefill")
        bar(phase, done, total)

    def finished(tokens: list[list[int]]) -> list[bool]:
        return [any(stop in job.vocabulary.text(t) for stop in cfg.stop) for t in tokens]

    sequences = Sequences(engine.model, engine.device, batch, engine.stream.begin_pass)
    keep = cfg.validate is Validation.full
    result = generate(sequences, batch, sampler, finished if cfg.stop else None, progress, keep)
    clock.book("decode")
    return result


def _validate(job: Job, got: Generation, bar: PhaseBar) -> dict[str, Any]:
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, job.device)
    model = load_unstreamed(job.checkpoint, job.device)
    check = compare_logits(model, job.device, next(job.batches()), got, lambda done, total: bar("validate", done, total))
    return asdict(check)
