"""What a run writes of itself: the keys of WSM's benchmark (docs/origins.md), and predicted against measured for every predicted figure."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import transformers

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.common.timeline.spans import EXPERTS, H2D, KV
from penstock.planner.contract.bills.cost import Prediction
from penstock.planner.contract.prices.memory_law import ssd_use, used_bytes
from penstock.runtime.engine.passes.generate import Generation
from penstock.runtime.engine.run_job import Job, Served
from penstock.runtime.told.account import account, total
from penstock.runtime.told.busy import busy_shares
from penstock.runtime.told.stage_clock import StageClock, StageUse

FIGURES: dict[str, Callable[[Any], str]] = {
    "load_s": show_seconds,
    "ttft_s": show_seconds,
    "prefill_s": show_seconds,
    "decode_s_per_token": show_seconds,
    "decode_tokens_per_s": "{:.4g}".format,
    "tokens_a_pass": "{:.3g}".format,
    "drafts_kept": "{:.1%}".format,
    "ssd_bytes_per_token": show_bytes,
    "h2d_bytes_per_token": show_bytes,
    "vram_bytes": show_bytes,
    "dram_bytes": show_bytes,
    "ssd_bytes": show_bytes,
    "experts_missed_vram": "{:.1%}".format,
    "experts_missed_dram": "{:.1%}".format,
}
"""Predicted figures that a run measures, with how each is shown."""
WORKING = ("prefill", "decode")
"""Phases whose waits are reported."""


@dataclass(frozen=True)
class Outcome:
    """Everything that a finished run knows."""

    job: Job
    rounds: Sequence[Sequence[Served]]
    """Of each the batches, one after the other."""
    load_s: float
    clock: StageClock
    dram_bytes: int
    vram_bytes: int
    engine: Mapping[str, Any]
    rules_broken: list[str]
    logits: Mapping[str, Any] | None
    """The comparison with the unstreamed model, None when it was not asked for."""
    interrupted: bool = False
    """Whether a signal ended it before its time."""

    @property
    def generations(self) -> list[Generation]:
        """Of all rounds, one after the other."""
        return [served.made for batches in self.rounds for served in batches]

    @property
    def replies(self) -> list[list[int]]:
        """The reply to each request in the first round."""
        said = {k: tokens for served in self.rounds[0] for k, tokens in zip(served.members, served.made.tokens, strict=True)}
        return [said[k] for k in sorted(said)]


def make_report(outcome: Outcome) -> dict[str, Any]:
    """The report as plain JSON values."""
    job = outcome.job
    own = job.plan.of_rank(0)
    measured = _measured(outcome)
    reuse = outcome.engine["kv_reuse"]
    rows = account(job, outcome.rounds, reuse and reuse["requests"])
    decode = outcome.clock.phases["decode"]
    streams = {stage: decode.get(stage, StageUse()) for stage in ("ssd", "d2h")}
    units, experts, kv = (outcome.clock.tracks["decode"].get(track, StageUse()) for track in (H2D, EXPERTS, KV))
    weights, moved = units.plus(experts), outcome.clock.step_bytes
    cuda = job.device.type == "cuda"
    return {
        **_seeds_keys(outcome, rows),
        "io_bw_MBps": {
            "weight_h2d_MBps": weights.mbps,
            "weight_ssd_MBps": streams["ssd"].mbps,
            "kv_h2d_MBps": kv.mbps,
            "kv_d2h_MBps": streams["d2h"].mbps,
        },
        "gpu_mem_GB": {
            "allocated_GB": torch.cuda.max_memory_allocated(job.device) / 1e9 if cuda else None,
            "reserved_GB": torch.cuda.max_memory_reserved(job.device) / 1e9 if cuda else None,
        },
        "mode": "mixed" if streams["ssd"].bytes else "stream" if weights.bytes else "full",
        "batches": len(outcome.generations),
        "device": str(job.device),
        "wsm": {
            "enabled": bool(streams["ssd"].bytes or weights.bytes),
            "ssd_enabled": bool(streams["ssd"].bytes),
            "gpu_max_groups": job.plan.decisions.weights.vram.slots,
        },
        "sampling": job.sampling.facts(),
        "predicted": asdict(job.plan.prediction),
        "measured": measured,
        "ratio": _ratios(job.plan.prediction, measured),
        "stages": outcome.clock.as_json(),
        "waited": {phase: outcome.clock.waited(phase) for phase in WORKING},
        "busy": {phase: busy_shares(outcome.clock.phases[phase], outcome.clock.seconds[phase], own.hardware) for phase in WORKING},
        "rounds": len(outcome.rounds),
        **outcome.engine,
        "kv_reuse": reuse and {key: value for key, value in reuse.items() if key != "requests"},
        "requests": rows,
        "requests_total": total(rows),
        "interrupted": outcome.interrupted,
        "rules_broken": outcome.rules_broken,
        "logits": outcome.logits,
        "prefill_each_s": [g.prefill_s for g in outcome.generations],
        "step_s": [s for g in outcome.generations for s in g.step_s],
        "step_bytes": {stage: [step.get(stage, 0) for step in moved] for stage in sorted({s for step in moved for s in step})},
        "texts": [job.vocabulary.text(t) for t in outcome.replies],
        "tokens": outcome.replies,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
    }


def _measured(outcome: Outcome) -> dict[str, Any]:
    """The measured twin of ``Prediction``: medians over batches and steps, bytes per decode step, peak bytes per tier."""
    generations, phases, plan = outcome.generations, outcome.clock.phases, outcome.job.plan
    ranks = outcome.engine["ranks"] or []
    steps = [s for g in generations for s in g.step_s]
    step = median(steps) if steps else None
    drafts = outcome.engine["speculation"]
    a_pass = drafts["tokens_a_pass"] or 1.0 if drafts else 1.0
    beside = [rank["stages"].get("decode", {}) for rank in ranks[1:]]
    moved = {stage: use.bytes + sum(each[stage]["bytes"] for each in beside if stage in each) for stage, use in phases["decode"].items()}
    per_step = {stage: round(nbytes / len(steps)) for stage, nbytes in moved.items()} if steps else {}
    return {
        "load_s": outcome.load_s,
        "ttft_s": median(g.prefill_s + g.first_token_s for g in generations),
        "prefill_s": median(g.prefill_s for g in generations),
        "decode_s_per_token": step,
        "tokens_a_pass": a_pass,
        "drafts_kept": drafts["kept"] / max(1, sum(drafts["tried_at"])) if drafts else 0.0,
        "decode_tokens_per_s": _tokens_per_s(generations, step, drafted=bool(drafts)),
        "bottleneck_prefill": busiest(phases["prefill"]),
        "bottleneck_decode": busiest(phases["decode"]) if steps else None,
        "ssd_bytes_per_token": per_step.get("ssd", 0) if steps else None,
        "h2d_bytes_per_token": per_step.get("h2d", 0) if steps else None,
        "vram_bytes": max([outcome.vram_bytes, *(rank["vram_bytes"] for rank in ranks)]),
        "dram_bytes": outcome.dram_bytes + sum(rank["dram_bytes"] for rank in ranks[1:]),
        "ssd_bytes": sum(
            used_bytes(ssd_use(own.hardware, own.model, own.workload, own.decisions))
            for own in (plan.of_rank(rank) for rank in range(plan.ranks.count))
        ),
        **_missed(outcome.engine["experts"]),
    }


def _tokens_per_s(generations: Sequence[Generation], step: float | None, drafted: bool) -> float | None:
    """Of decode steps: one of median length; where passes differ by their drafts, of all."""
    if drafted:
        return sum(made.stepped for made in generations) / sum(made.decode_s for made in generations) if step else None
    return len(generations[0].tokens) / step if step else None


def _missed(experts: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Shares of a decode step's experts; 0 for a dense model and, of VRAM, without a GPU."""
    missed = experts["missed"] if experts else {"vram": 0.0, "dram": 0.0}
    return {"experts_missed_vram": missed["vram"] if experts is None or experts["vram"] else 0.0, "experts_missed_dram": missed["dram"]}


def _ratios(predicted: Prediction, measured: Mapping[str, Any]) -> dict[str, float | None]:
    """Predicted over measured; None where nothing was measured, 1 where both are nothing."""
    out: dict[str, float | None] = {}
    for key in FIGURES:
        want, got = getattr(predicted, key), measured[key]
        out[key] = 1.0 if not want and got == 0 else want / got if got else None
    return out


def _seeds_keys(outcome: Outcome, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of WSM's benchmark JSON: milliseconds, summed over batches, means over rounds."""
    generations, rounds, job = outcome.generations, len(outcome.rounds), outcome.job
    prefill = sum(g.prefill_s for g in generations) / rounds
    first = sum(g.first_token_s for g in generations) / rounds
    decode = sum(g.decode_s for g in generations) / rounds
    new = sum(map(len, outcome.replies))
    stepped = sum(max(0, row["generated_tokens"] - 1) for row in rows) / rounds
    lens = [row["prompt_tokens"] for row in rows if row["round"] == 0]
    return {
        "batch_size": job.plan.decisions.batch,
        "max_new_tokens": job.max_new_tokens,
        "prompt_lens": lens,
        "prefill_tokens_total": sum(lens),
        "decode_tokens_total": new,
        "prefill_ms": prefill * 1e3,
        "first_token_decode_ms": first * 1e3,
        "ttft_ms": (prefill + first) / len(outcome.rounds[0]) * 1e3,
        "decode_ms": decode * 1e3,
        "e2e_ms": (prefill + first + decode) * 1e3,
        "throughput_tok_s": stepped / decode if decode else None,
        "end_to_end_tok_s": new / (prefill + first + decode),
    }


def busiest(stages: Mapping[str, StageUse]) -> str | None:
    """The stage that had work in flight longest."""
    return max(stages, key=lambda name: stages[name].busy_s) if stages else None
