"""What a run says of itself: the seeds' benchmark keys, and predicted against measured for every predicted figure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from planner.cost import Prediction
from planner.errors import UserError
from planner.units import show_bytes, show_seconds
from runtime.generate import Generation

FIGURES = (
    ("load_s", show_seconds), ("ttft_s", show_seconds), ("prefill_s", show_seconds), ("decode_s_per_token", show_seconds),
    ("decode_tokens_per_s", "{:.4g}".format), ("ssd_bytes_per_token", show_bytes), ("h2d_bytes_per_token", show_bytes),
    ("vram_bytes", show_bytes), ("dram_bytes", show_bytes), ("ssd_bytes", show_bytes),
)
"""Predicted figures that a run measures, with how each is shown."""


@dataclass(frozen=True)
class StageUse:
    """What a stage did in a phase. ``mbps`` is None when it did nothing."""

    bytes: int
    busy_s: float
    mbps: float | None


def stage_use(nbytes: int, busy_s: float) -> StageUse:
    """Bytes and busy seconds with their rate."""
    return StageUse(nbytes, busy_s, nbytes / busy_s / 1e6 if busy_s and nbytes else None)


def measured_figures(
    batches: list[Generation], load_s: float, decode_stages: Mapping[str, StageUse], prefill_stages: Mapping[str, StageUse], tiers: Mapping[str, int]
) -> dict[str, Any]:
    """The measured twin of ``Prediction``: medians over batches and steps, bytes per decode step, peak bytes per tier."""
    steps = [s for b in batches for s in b.step_s]
    step = median(steps) if steps else None
    per_step = {name: round(use.bytes / len(steps)) if steps else None for name, use in decode_stages.items()}
    width = len(batches[0].tokens)
    return {
        "load_s": load_s,
        "ttft_s": median(b.prefill_s + b.first_token_s for b in batches),
        "prefill_s": median(b.prefill_s for b in batches),
        "decode_s_per_token": step,
        "decode_tokens_per_s": width / step if step else None,
        "bottleneck_prefill": _busiest(prefill_stages),
        "bottleneck_decode": _busiest(decode_stages) if steps else None,
        "ssd_bytes_per_token": per_step.get("ssd"),
        "h2d_bytes_per_token": per_step.get("h2d", 0),
        **tiers,
    }


def ratios(predicted: Prediction, measured: Mapping[str, Any]) -> dict[str, float | None]:
    """Predicted over measured; None where nothing was measured, 1 where both are nothing."""
    out: dict[str, float | None] = {}
    for key, _ in FIGURES:
        want, got = getattr(predicted, key), measured.get(key)
        out[key] = 1.0 if not want and got == 0 else want / got if got else None
    return out


def seeds_keys(batches: list[Generation], prompt_lens: list[int], max_new_tokens: int, bandwidth: Mapping[str, float | None]) -> dict[str, Any]:
    """The keys of the seeds' benchmark JSON, milliseconds and MB/s, summed over batches."""
    prefill = sum(b.prefill_s for b in batches)
    first = sum(b.first_token_s for b in batches)
    decode = sum(b.decode_s for b in batches)
    new = sum(len(t) for b in batches for t in b.tokens)
    stepped = sum(len(b.step_s) * len(b.tokens) for b in batches)
    return {
        "batch_size": len(batches[0].tokens),
        "max_new_tokens": max_new_tokens,
        "prompt_lens": prompt_lens,
        "prefill_tokens_total": sum(prompt_lens),
        "decode_tokens_total": new,
        "prefill_ms": prefill * 1e3,
        "first_token_decode_ms": first * 1e3,
        "ttft_ms": (prefill + first) / len(batches) * 1e3,
        "decode_ms": decode * 1e3,
        "e2e_ms": (prefill + first + decode) * 1e3,
        "throughput_tok_s": stepped / decode if decode else None,
        "end_to_end_tok_s": new / (prefill + first + decode),
        "io_bw_MBps": dict(bandwidth),
    }


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Write JSON at once or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"out={path}: cannot write the report ({error.strerror}); choose another out=") from error
    finally:
        temporary.unlink(missing_ok=True)


def show(console: Console, predicted: Prediction, measured: Mapping[str, Any], stages: Mapping[str, Mapping[str, StageUse]]) -> None:
    """Predicted against measured, then what each stage did while decoding."""
    table = Table(title="predicted against measured", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name, justify in (("figure", "left"), ("predicted", "right"), ("measured", "right"), ("ratio", "right")):
        table.add_column(name, justify=justify)
    for (key, fmt), ratio in zip(FIGURES, ratios(predicted, measured).values(), strict=True):
        got = measured.get(key)
        colour = "" if ratio is None else "green" if 0.8 <= ratio <= 1.25 else "yellow"
        text = "-" if ratio is None else f"{ratio:.2f}"
        table.add_row(key, fmt(getattr(predicted, key)), "-" if got is None else fmt(got), f"[{colour}]{text}[/]" if colour else text)
    for phase in ("prefill", "decode"):
        key = f"bottleneck_{phase}"
        table.add_row(key, str(getattr(predicted, key)), str(measured.get(key) or "-"), "")
    console.print(table)
    table = Table(title="stages", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name, justify in (("phase", "left"), ("stage", "left"), ("bytes", "right"), ("busy", "right"), ("MB/s", "right")):
        table.add_column(name, justify=justify)
    for phase, uses in stages.items():
        for stage, use in uses.items():
            if use.busy_s:
                rate = "" if use.mbps is None else f"{use.mbps:,.0f}"
                table.add_row(phase, stage, show_bytes(use.bytes) if use.bytes else "", show_seconds(use.busy_s), rate)
    console.print(table)


def as_json(stages: Mapping[str, Mapping[str, StageUse]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Stage uses as plain mappings."""
    return {phase: {stage: asdict(use) for stage, use in uses.items()} for phase, uses in stages.items()}


def _busiest(stages: Mapping[str, StageUse]) -> str | None:
    return max(stages, key=lambda name: stages[name].busy_s) if stages else None
