"""`runtime run`: execute a plan on a checkpoint, and say what it did and where the plan was wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing as closed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from rich.console import Console

from penstock.planner.common.console import Screen
from penstock.planner.common.interrupt import noted
from penstock.planner.common.output import write_json
from penstock.planner.common.outside.machine_load import Ticks
from penstock.planner.common.timeline.spans import Timeline
from penstock.planner.common.timeline.timeline_file import write_trace
from penstock.planner.common.user_folder import user_path
from penstock.runtime.asked.order import Order
from penstock.runtime.asked.run_schema import RunConfig, Validation
from penstock.runtime.beside.on_host import multiplying
from penstock.runtime.engine.link_limits import measure_compute, measure_limits
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.passes.generate import Batch, Generation, Progress
from penstock.runtime.engine.passes.sampling import Sampler
from penstock.runtime.engine.run_job import Job, Served, prepare
from penstock.runtime.engine.session import Session
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.engine.validate import broken_at_run_time, compare_logits, load_unstreamed, original_of
from penstock.runtime.memory.gpu_sampler import GpuSampler
from penstock.runtime.memory.groundwork import Groundwork
from penstock.runtime.store.manifest import MANIFEST
from penstock.runtime.told.calibrate import calibrate, check_card
from penstock.runtime.told.others_load import OthersLoad
from penstock.runtime.told.progress import PhaseBar
from penstock.runtime.told.rank_links import measure_links
from penstock.runtime.told.rank_report import rank_report
from penstock.runtime.told.run_report import Outcome, make_report
from penstock.runtime.told.run_summary import closing, show
from penstock.runtime.told.run_timeline import PassMarks, make_timeline
from penstock.runtime.told.stage_clock import StageClock
from penstock.runtime.told.startup import Startup
from penstock.runtime.told.texts import Texts

LOADING = ("arena", "cuda", "engine", "rehearsal", "load")
"""Phases of a start in which memory is taken and weights are loaded, as far as the main thread waited for it."""


@dataclass
class _Streamed:
    """The streamed part of a run, over before anything is validated. ``job`` carries the prediction for the machine as it turned out."""

    job: Job
    rounds: list[list[Served]]
    load_s: float
    clock: StageClock
    dram_bytes: int
    vram_bytes: int
    engine: dict[str, Any]
    rules_broken: list[str]
    timeline: Timeline
    left: list[int]
    """Signals by which it was left before it was over."""


def run(cfg: RunConfig, order: Order, device: torch.device, ground: Groundwork, startup: Startup) -> None:
    """Execute ``order``: texts, tables and one JSON line on stdout, the report in ``order.out``. ``ground`` is given back on the way.

    SIGINT and SIGTERM end it after the pass in progress once a token is known: what there is is told, and then they are heard.
    """
    transformers.utils.logging.disable_progress_bar()
    console = Screen(highlight=False, quiet=cfg.quiet)
    if cfg.calibrate:
        check_card(order.plan, device)
    job = prepare(cfg, order, device, ground.free(), startup.so_far_s)
    for note in dict.fromkeys([*job.plan.notes, *cfg.notes, *job.notes]):
        console.print(f"note: {note}", style="dim", markup=False)
    if job.sampling.line is not None:
        console.print(job.sampling.line, style="dim", markup=False, soft_wrap=True)
    with PhaseBar() as bar:
        texts = Texts(Screen(highlight=False), job.vocabulary.text, len(job.requests), cfg.quiet)
        streamed = _stream(job, cfg, ground, startup, console, bar, texts)
        compared = cfg.validate is Validation.full and not streamed.left
        logits = _validate(job, streamed.rounds[0][0], bar) if compared else None
    outcome = Outcome(
        job=streamed.job,
        rounds=streamed.rounds,
        load_s=streamed.load_s,
        clock=streamed.clock,
        dram_bytes=streamed.dram_bytes,
        vram_bytes=streamed.vram_bytes,
        engine=streamed.engine,
        rules_broken=streamed.rules_broken,
        logits=logits,
        interrupted=bool(streamed.left),
    )
    report = make_report(outcome) | {"calibration": calibrate(outcome) if cfg.calibrate and not streamed.left else None}
    write_json(order.out, "out", report)
    if order.trace is not None:
        write_trace(streamed.timeline, order.trace)
    show(console, outcome, report, order.out)
    if not cfg.quiet or cfg.json:
        cfg.close(closing(report, order.out))
    for number in streamed.left[:1]:
        signal.raise_signal(number)


def _stream(job: Job, cfg: RunConfig, ground: Groundwork, startup: Startup, console: Console, bar: PhaseBar, texts: Texts) -> _Streamed:
    say = (lambda line: console.print(f"[penstock] {line}", markup=False)) if cfg.verbose else None
    record = None if cfg.moe.record is None else user_path(cfg.moe.record)

    def tell(line: str) -> None:
        console.print(f"note: {line}", style="dim", markup=False)

    options = EngineOptions(**vars(cfg.engine), record=record, keep_spans=cfg.trace is not None, tell=tell)
    opened = open_session(job.plan, job.checkpoint, ground, options, cfg.kv, say, startup.mark, read_at_once=not cfg.limits)
    with opened as session:
        job, engine = replace(job, plan=session.plan), session.engine
        if session.pageable is not None:
            tell(session.pageable)
        clock, limits = StageClock(engine, session.book), {}
        if cfg.limits and session.rank is None:
            limits["before"] = measure_limits(engine)
            clock.book("limits")
            startup.skip()
        session.load(job.largest, bar, [Sampler(job.sampling, session.device)])
        job = replace(job, plan=session.plan)
        clock.book("load")
        for said in filter(None, (session.launched, session.prompts_launched)):
            tell(said)
        if session.slow_pages is not None:
            console.print(f"warning: {session.slow_pages}", style="yellow", markup=False, soft_wrap=True)
        for _ in range(cfg.warmup_rounds):
            _play(job, cfg, session, bar, None, None, [])
        if cfg.warmup_rounds:
            clock.book("warmup")
        begun, before = engine.ledger.now(), Ticks.now()
        left: list[int] = []
        with noted(left, lambda: texts.begun and not left):
            with GpuSampler(job.device) as gpu:
                rounds = [_play(job, cfg, session, bar, clock, texts, left)]
                rounds += [_play(job, cfg, session, bar, clock, None, left) for _ in range(cfg.rounds - 1) if not left]
            others = OthersLoad.between(before, Ticks.now(), os.cpu_count() or 1) if session.rank is None else None
            dram_bytes, vram_bytes = session.peak_dram_bytes, session.vram.peak_bytes()
            _wait_for_kept(session.flush, bar, left)
            clock.book("keeping")
        facts = engine.facts() | session.vram.facts() | {"kv_reuse": session.kept_facts(), "cpu_product": session.cpu_products}
        facts["others"] = others and others._asdict()
        if others is not None and others.note is not None:
            tell(others.note)
        facts["speculation"] = session.chains and session.chains.facts()
        if cfg.limits and session.rank is not None and not left:
            limits["links"] = measure_links(session)
        elif cfg.limits and not left:
            engine.stop()
            limits["after"] = measure_limits(engine)
            limits["compute"] = measure_compute(engine, job.first)
        broken = broken_at_run_time(session.own, engine.dram.cache.stats, dram_bytes, vram_bytes)
        first = rounds[0][0].made
        startup.add("prefill", first.prefill_s + first.first_token_s)
        load_s = sum(startup.seconds[phase] for phase in LOADING)
        facts["ranks"] = None if session.rank is None else [rank_report(session, clock), *session.rank.reports()]
        facts |= {"limits": limits, **startup.facts(ground.beside() | session.loaded), "gpu": gpu.report()}
        timeline = make_timeline(engine.ledger, begun, gpu.samples, job.plan)
        return _Streamed(job, [served for served in rounds if served], load_s, clock, dram_bytes, vram_bytes, facts, broken, timeline, left)


def _play(
    job: Job,
    cfg: RunConfig,
    session: Session,
    bar: PhaseBar,
    clock: StageClock | None,
    texts: Texts | None,
    left: list[int],
) -> list[Served]:
    """One round, in which the same is drawn as in any other: each batch and what came of it, up to where a signal is noted in ``left``."""
    sampler, over = Sampler(job.sampling, session.device), []
    for served in job.play(partial(_generate, job, cfg, session, sampler, bar, clock, texts, left)):
        over.append(served)
        if texts is not None:
            bar.rest()
            for number, tokens, cut in zip(served.members, served.made.tokens, served.cut, strict=True):
                texts.over(number, tokens, cut)
        if left:
            break
    return over


def _generate(
    job: Job,
    cfg: RunConfig,
    session: Session,
    sampler: Sampler,
    bar: PhaseBar,
    clock: StageClock | None,
    texts: Texts | None,
    left: list[int],
    batch: Batch,
) -> Generation:
    """Run one batch, up to where a signal is noted in ``left``; without ``clock`` it only warms up, and restores and keeps no prompt."""
    live = texts is not None and texts.live

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "decode":
            marks.token(done)
            if clock is not None:
                clock.book("prefill") if done == 1 else clock.step()
        if phase == "decode" and live:
            bar.rest()
        else:
            bar(phase, done, total)

    def finished(tokens: list[list[int]]) -> list[bool]:
        return [any(stop in job.vocabulary.text(t) for stop in cfg.stop) for t in tokens]

    keep = cfg.validate is Validation.full
    marks = PassMarks(session.engine.ledger)
    made = session.generating(batch, sampler, finished if cfg.stop else None, progress, keep, reuse=clock is not None)
    with closed(made):
        for result in made:
            if texts is not None:
                texts.hear(result.tokens)
            if left:
                break
    if clock is not None:
        clock.book("decode")
        _wait_for_kept(session.make_way, bar, left)
        clock.book("keeping")
    return result


class _Left(Exception):
    """A signal was noted."""


def _wait_for_kept(wait: Callable[[Progress], None], bar: PhaseBar, left: list[int]) -> None:
    """Wait for the prompts' pages, up to where a signal is noted in ``left``."""

    def progress(phase: str, done: int, total: int) -> None:
        if left:
            raise _Left
        bar(phase, done, total)

    if not left:
        with suppress(_Left):
            wait(progress)


def _validate(job: Job, first: Served, bar: PhaseBar) -> dict[str, Any]:
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, job.device)
    original = original_of(job.plan, job.checkpoint)
    packed = "the same packed store, unstreamed" if (job.checkpoint / MANIFEST).exists() else "the unstreamed model"
    model = load_unstreamed(original or job.checkpoint, job.device)
    page_tokens, threads = job.plan.decisions.kv.page_tokens, 0 if job.plan.hardware.gpu else job.plan.hardware.cpu_threads
    with multiplying(threads):  # as the run did: other numbers of threads may add up in another order
        check = compare_logits(model, job.device, first.batch, first.made, page_tokens, lambda done, total: bar("validate", done, total))
    return asdict(check) | {"against": packed if original is None else "the checkpoint that was packed, unstreamed"}
