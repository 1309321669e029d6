"""`runtime run`: check a plan, execute it on a checkpoint, and say what it did and where the plan was wrong."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from planner.checkpoint import spec_from_checkpoint
from planner.cost import predict
from planner.errors import UserError
from planner.force import Force
from planner.memory import ssd_use, used_bytes
from planner.model import ModelSpec
from planner.plan import Plan
from planner.planfile import check_plan, read_plan
from runtime.device import CudaDevice
from runtime.engine import Engine, EngineOptions
from runtime.generate import Generation, Sampler, Sampling, generate
from runtime.memory import PeakDram, refuse_if_short
from runtime.prompts import Request, Vocabulary, read_requests, read_vocabulary
from runtime.report import StageUse, as_json, measured_figures, ratios, seeds_keys, show, stage_use, write_report
from runtime.schema import RunConfig, Validation
from runtime.validate import broken_at_run_time, compare_logits, load_unstreamed


@dataclass(frozen=True)
class Job:
    """A plan that was found fit to run, and what it is asked."""

    plan: Plan
    checkpoint: Path
    device: torch.device
    vocabulary: Vocabulary
    requests: list[Request]
    batch: int
    max_new_tokens: int

    @property
    def capacity(self) -> int:
        """Tokens of KV that each sequence has."""
        kv = self.plan.decisions.kv
        return kv.pages // self.plan.decisions.batch * kv.page_tokens


def prepare(cfg: RunConfig) -> Job:
    """Read and check everything that can be refused before a byte of weights is loaded."""
    plan = read_plan(Path(cfg.plan))
    forced = Force.from_config(cfg.force)
    if forced.given:
        plan = replace(plan, decisions=forced.apply(plan.decisions))
    check_plan(plan)
    where = cfg.checkpoint or plan.model.checkpoint
    if where is None:
        raise UserError(f"{cfg.plan} was made for the preset {plan.model.name}, without weights; give checkpoint=DIR")
    checkpoint = Path(where)
    _refuse_other_model(plan.model, spec_from_checkpoint(checkpoint), checkpoint)
    if plan.hardware.gpu is not None and not torch.cuda.is_available():
        raise UserError(f"the plan is for a GPU ({plan.hardware.gpu.name}) and torch sees none here; solve again with hardware=local")
    device = torch.device("cuda", 0) if plan.hardware.gpu is not None else torch.device("cpu")
    outside = plan.decisions.kv.ssd_pages + (plan.decisions.kv.dram_pages if plan.hardware.gpu else 0)
    if outside:
        raise UserError(f"the plan keeps {outside} KV pages outside VRAM, which this version cannot execute; solve with workload.kv_spill=false")
    vocabulary = read_vocabulary(checkpoint, plan.model.vocab)
    batch = cfg.batch or plan.decisions.batch
    if not 1 <= batch <= plan.decisions.batch:
        raise UserError(f"batch={batch}: the plan holds KV for 1 to {plan.decisions.batch} sequences; solve with workload.batch={batch}")
    job = Job(plan, checkpoint, device, vocabulary, [], batch, plan.workload.new_tokens if cfg.max_new_tokens is None else cfg.max_new_tokens)
    if not 1 <= job.max_new_tokens < job.capacity:
        raise UserError(
            f"max_new_tokens={job.max_new_tokens}: the plan holds KV for {job.capacity} tokens a sequence, so 1 to {job.capacity - 1} are allowed;"
            f" solve with workload.new_tokens={job.max_new_tokens}"
        )
    requests = read_requests(
        vocabulary, cfg.prompt, Path(cfg.prompts) if cfg.prompts else None, max(batch, plan.workload.requests) if cfg.batch is None else batch,
        cfg.prompt_tokens or plan.workload.prompt_tokens, cfg.seed, job.capacity - job.max_new_tokens,
    )
    work = replace(
        plan.workload, batch=batch, prompt_tokens=max(len(r.ids) for r in requests), new_tokens=job.max_new_tokens, requests=len(requests)
    )
    decisions = replace(plan.decisions, batch=batch)
    plan = replace(plan, workload=work, decisions=decisions, predicted=predict(plan.hardware, plan.model, work, decisions))
    refuse_if_short(plan, device)
    return replace(job, plan=plan, requests=requests, batch=min(batch, len(requests)))


def run(cfg: RunConfig) -> dict[str, Any]:
    """Execute ``cfg.plan``; prints texts, tables and one JSON line, writes the report, returns it."""
    console = Console(highlight=False)
    job = prepare(cfg)
    for note in [*job.plan.notes, *cfg.notes]:
        console.print(f"note: {note}", style="dim")
    say = (lambda line: console.print(f"\\[penstock] {line}")) if cfg.verbose else None
    options = EngineOptions(cfg.engine.wrap_around, cfg.engine.skip_preload_wait)
    if job.device.type == "cuda":
        _warm_cuda(job)
    peak = PeakDram()
    started = time.perf_counter()
    copier = CudaDevice(job.device.index) if job.device.type == "cuda" else None
    with _bar(console) as bar:
        engine = Engine(job.plan, job.checkpoint, copier, job.device, options, say)
        with closing(engine):
            engine.load(bar)
            load_s = time.perf_counter() - started
            stages = {"load": _since(engine, {})}
            batches = []
            for k in range(0, len(job.requests), job.batch):
                batches.append(_one_batch(engine, job, cfg, job.requests[k : k + job.batch], stages, bar))
            tiers = _tiers(job, peak)
            facts = {
                "cache": _cache_facts(engine), "ring": asdict(engine.ring.stats) if engine.ring else None,
                "ssd_reads": engine.pool.meter.reads, "ssd_retries": engine.pool.meter.retries, "direct_files": len(engine.pool.direct_files),
                "buffered_files": [str(f) for f in engine.pool.buffered_files],
            }
            stats = engine.dram.cache.stats
        del engine
        checks = {"rules_broken": broken_at_run_time(job.plan, stats, tiers["dram_bytes"], tiers["vram_bytes"] if copier else None)}
        if cfg.validate is Validation.full:
            checks["logits"] = asdict(_validate(job, batches[0], bar))
    return _finish(console, cfg, job, batches, load_s, stages, tiers, facts, checks)


def _one_batch(engine: Engine, job: Job, cfg: RunConfig, requests: list[Request], stages: dict, bar) -> Generation:
    plan, texts = job.plan, job.vocabulary
    before = _snapshot(engine)

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal before
        if phase == "prefill" and done == total:
            stages["prefill"] = _sum(stages.get("prefill"), _since(engine, before))
            before = _snapshot(engine)
        bar(phase, done, total)

    def finished(tokens: list[list[int]]) -> list[bool]:
        return [any(s in texts.text(t) for s in cfg.stop) for t in tokens]

    result = generate(
        engine.model, engine.device, engine.stream.begin_pass, [list(r.ids) for r in requests], job.max_new_tokens, job.capacity,
        plan.decisions.prefill_chunk_tokens, Sampler(Sampling(cfg.temperature, cfg.top_p, cfg.seed), engine.device), texts.stop_ids, texts.pad,
        finished if cfg.stop else None, progress, keep_logits=cfg.validate is Validation.full,
    )
    stages["decode"] = _sum(stages.get("decode"), _since(engine, before))
    return result


def _snapshot(engine: Engine) -> dict[str, tuple[int, float]]:
    engine.stream.settle()
    totals = {name: (t.bytes, t.busy_s) for name, t in engine.ledger.totals().items()}
    return {"ssd": (engine.pool.meter.bytes, engine.pool.meter.busy_seconds), **totals}


def _since(engine: Engine, before: dict[str, tuple[int, float]]) -> dict[str, StageUse]:
    now = _snapshot(engine)
    return {name: stage_use(b - before.get(name, (0, 0.0))[0], s - before.get(name, (0, 0.0))[1]) for name, (b, s) in now.items()}


def _sum(a: dict[str, StageUse] | None, b: dict[str, StageUse]) -> dict[str, StageUse]:
    return b if a is None else {n: stage_use(u.bytes + (a[n].bytes if n in a else 0), u.busy_s + (a[n].busy_s if n in a else 0)) for n, u in b.items()}


def _tiers(job: Job, peak: PeakDram) -> dict[str, int]:
    vram = 0
    if job.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(job.device)
        context = max(0, total - free - torch.cuda.memory_reserved(job.device))
        vram = torch.cuda.max_memory_allocated(job.device) + min(context, job.plan.hardware.gpu.context_bytes * 2)
    ssd = used_bytes(ssd_use(job.plan.hardware, job.plan.model, job.plan.workload, job.plan.decisions))
    return {"vram_bytes": vram, "dram_bytes": peak.peak_bytes(), "ssd_bytes": ssd}


def _cache_facts(engine: Engine) -> dict[str, Any]:
    stats = asdict(engine.dram.cache.stats)
    stats.pop("log")
    return stats


def _warm_cuda(job: Job) -> None:
    """Create the context and cap the allocator at the budget, so that the run can never take more than the plan may."""
    torch.ones(64, 64, device=job.device, dtype=torch.bfloat16).matmul(torch.ones(64, 64, device=job.device, dtype=torch.bfloat16))
    torch.cuda.synchronize(job.device)
    total = torch.cuda.get_device_properties(job.device).total_memory
    room = job.plan.hardware.vram_bytes - job.plan.hardware.gpu.context_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total), job.device)
    torch.cuda.reset_peak_memory_stats(job.device)


def _validate(job: Job, got: Generation, bar):
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, job.device)
    model = load_unstreamed(job.checkpoint, job.device)
    prompts = [list(r.ids) for r in job.requests[: job.batch]]
    chunk = job.plan.decisions.prefill_chunk_tokens
    return compare_logits(model, job.device, prompts, got, job.capacity, chunk, job.vocabulary.pad, lambda d, t: bar("validate", d, t))


def _finish(
    console: Console, cfg: RunConfig, job: Job, batches: list[Generation], load_s: float, stages: dict, tiers: dict, facts: dict, checks: dict
) -> dict[str, Any]:
    texts = [job.vocabulary.text(t) for b in batches for t in b.tokens]
    for k, (text, request) in enumerate(zip(texts, job.requests, strict=True)):
        cut = f" (prompt cut by {request.cut} tokens)" if request.cut else ""
        console.rule(f"text {k}{cut}", align="left", style="dim")
        console.print(text, markup=False)
    measured = measured_figures(batches, load_s, stages["decode"], stages["prefill"], tiers)
    console.rule(style="dim")
    show(console, job.plan.predicted, measured, stages)
    if "logits" in checks:
        logits = checks["logits"]
        same = "bit-identical" if logits["identical"] else f"within {logits['max_abs_error']:.3g} of {logits['max_abs_logit']:.3g}"
        console.print(f"logits against the unstreamed model, {logits['passes']} passes: {same}, same top token {logits['same_argmax']:.1%}")
    for line in checks["rules_broken"]:
        console.print(f"rule broken at run time: {line}", style="bold red")
    decode = stages["decode"]
    bandwidth = {
        "weight_h2d_MBps": decode["h2d"].mbps if "h2d" in decode else None, "weight_ssd_MBps": decode["ssd"].mbps,
        "kv_h2d_MBps": None, "kv_d2h_MBps": None,
    }
    lens = [len(r.ids) for r in job.requests]
    cuda = job.device.type == "cuda"
    report = {
        **seeds_keys(batches, lens, job.max_new_tokens, bandwidth),
        "gpu_mem_GB": {
            "allocated_GB": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
            "reserved_GB": torch.cuda.memory_reserved() / 1e9 if cuda else None,
        },
        "mode": "mixed" if stages["decode"]["ssd"].bytes else "stream" if cuda else "full",
        "device": str(job.device),
        "wsm": {"enabled": True, "ssd_enabled": bool(stages["decode"]["ssd"].bytes), "gpu_max_groups": job.plan.decisions.weights.vram.slots},
        "predicted": asdict(job.plan.predicted),
        "measured": measured,
        "ratio": ratios(job.plan.predicted, measured),
        "stages": as_json(stages),
        **facts,
        "checks": checks,
        "step_s": [s for b in batches for s in b.step_s],
        "texts": texts,
        "tokens": [t for b in batches for t in b.tokens],
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
    }
    path = Path(cfg.out)
    write_report(report, path)
    console.print(f"report: {path}", style="dim")
    summary = {key: measured[key] for key in ("ttft_s", "prefill_s", "decode_s_per_token", "decode_tokens_per_s")}
    print(json.dumps({"report": str(path), **summary, "ratio": report["ratio"], "checks": checks}))
    if checks["rules_broken"]:
        raise UserError(f"{len(checks['rules_broken'])} rule broken at run time: {checks['rules_broken'][0]}; see {path}")
    return report


def _refuse_other_model(planned: ModelSpec, found: ModelSpec, checkpoint: Path) -> None:
    if planned.digest is not None and planned.digest == found.digest:
        return
    for key in ("model_type", "layers", "hidden", "vocab", "dtype_bytes", "tied", "attn_bytes", "ffn_bytes", "embed_bytes", "head_bytes"):
        want, got = getattr(planned, key), getattr(found, key)
        if want != got and not (key == "model_type" and not want):
            raise UserError(f"{checkpoint} is not the plan's model {planned.name}: {key} is {_brief(got)}, the plan says {_brief(want)}; solve again for it")
    if planned.digest is not None and planned.digest != found.digest and planned.checkpoint is not None:
        raise UserError(f"{checkpoint} holds other weights than the plan's {planned.checkpoint} (digest differs); solve again for it")


def _brief(value: object) -> str:
    return f"{sum(value)} bytes in all" if isinstance(value, tuple) else str(value)


class _bar:
    """One progress line for the phases of a run; a phase's bar goes when the next begins."""

    def __init__(self, console: Console):
        self._progress = Progress(
            TextColumn("{task.description:>9}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn(),
            console=Console(stderr=True, highlight=False), transient=True,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Callable[[str, int, int], None]:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            for task in self._tasks.values():
                self._progress.update(task, visible=False)
            self._tasks[phase] = self._progress.add_task(phase)
        self._progress.update(self._tasks[phase], completed=done, total=total, visible=True)
