"""The comparison as rows: each system beside Penstock and beside the limit of the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.peers.peer import SYSTEMS, Measured
from penstock.planner.common.measures import show_bytes


@dataclass(frozen=True)
class Ended:
    """How a system's process ended: with figures, or with the one line that says why not."""

    measured: Measured | None
    message: str = ""


@dataclass(frozen=True)
class Row:
    """One system. Figures are None where the process ended without them, or Penstock's are missing."""

    system: str
    title: str
    message: str
    """Why there are no figures; empty when there are."""
    prefill_s: float | None = None
    decode_s: float | None = None
    """Median over passes; each gives every sequence of the batch a token."""
    tokens_per_s: float | None = None
    times_penstock: float | None = None
    """Decode seconds over Penstock's."""
    of_limit: float | None = None
    """Seconds that Penstock's bytes take at the limit of their link, over this system's decode seconds."""
    vram_bytes: int | None = None
    dram_bytes: int | None = None
    agreed: float | None = None
    """Share of tokens before the first that differs from the reference. BF16 kernels round differently: 1 is not to be expected of
    random weights."""
    load_s: float | None = None
    step_s: Sequence[float] = ()
    tokens: Sequence[Sequence[int]] = ()


def make_rows(ended: Mapping[str, Ended]) -> list[Row]:
    """In the order of ``ended``. The reference for tokens is Penstock, or the first system with figures."""
    done = {name: e.measured for name, e in ended.items() if e.measured}
    ours = done.get("penstock")
    reference = ours or next(iter(done.values()), None)
    our_s = median(ours.step_s) if ours and ours.step_s else None
    bound_s = max((ours.limit or {}).values(), default=None) if ours else None
    rows = []
    for name, end in ended.items():
        title, got = SYSTEMS[name].title, end.measured
        if got is None:
            rows.append(Row(name, title, end.message))
            continue
        step = median(got.step_s) if got.step_s else None
        rows.append(
            Row(
                system=name,
                title=title,
                message="",
                prefill_s=got.prefill_s,
                decode_s=step,
                tokens_per_s=len(got.tokens) / step if step else None,
                times_penstock=step / our_s if step and our_s else None,
                of_limit=bound_s / step if step and bound_s else None,
                vram_bytes=got.vram_bytes,
                dram_bytes=got.dram_bytes,
                agreed=agreement(got.tokens, reference.tokens),
                load_s=got.load_s,
                step_s=got.step_s,
                tokens=got.tokens,
            )
        )
    return rows


def agreement(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Share of the reference's tokens that come before the first difference, over all sequences."""
    same = 0
    for got, want in zip(tokens, reference, strict=True):
        pairs = list(zip(got, want, strict=False))
        same += next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return same / max(1, sum(map(len, reference)))


def describe(machine: Mapping[str, Any], versions: Mapping[str, str], work: Mapping[str, Any]) -> str:
    """Two lines: the work, and what it ran on."""
    budget = f"VRAM budget {show_bytes(work['vram_bytes'])}" if work["vram_bytes"] else "CPU"
    if work["dram_bytes"] is not None:
        budget += f", DRAM budget {show_bytes(work['dram_bytes'])}"
    what = f"{work['checkpoint']} ({show_bytes(work['checkpoint_bytes'])}), batch {work['batch']}"
    what += f", prompt {work['prompt_tokens']}, {work['new_tokens']} new tokens, {budget}"
    where = f"{machine['gpu'] or 'no GPU'}, {machine['cores']} cores, {machine['dram_gb']:.0f} GB DRAM, {machine['date']}"
    return f"{what}\n{where}; {', '.join(f'{k} {v}' for k, v in versions.items())}"


def show(rows: Sequence[Row], caption: str) -> None:
    """The table, and under it why some systems have no figures."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("prefill s", "decode s/token", "tokens/s", "x Penstock's time", "% of limit", "peak VRAM", "peak DRAM", "same tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.message:
            table.add_row(row.title, "no figures")
            continue
        table.add_row(
            row.title,
            _figure(row.prefill_s, "{:.3f}"),
            _figure(row.decode_s, "{:.4f}"),
            _figure(row.tokens_per_s, "{:.3g}"),
            _figure(row.times_penstock, "{:.2f}"),
            _figure(row.of_limit, "{:.1%}"),
            show_bytes(row.vram_bytes),
            show_bytes(row.dram_bytes),
            _figure(row.agreed, "{:.0%}"),
        )
    console = Console(width=180, highlight=False, markup=False)
    console.print(caption, soft_wrap=True)
    console.print(table)
    for row in rows:
        if row.message:
            console.print(f"{row.title}: {row.message}", soft_wrap=True)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
