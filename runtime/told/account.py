"""What each request of a run was, and what it cost: rows for the report, and a short table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.engine.run_job import Job, Served

ROWS = 20
"""Of a table, at most; a report has them all."""
LEVELS = {str(Tier.vram): "L1", str(Tier.dram): "L2", str(Tier.ssd): "L3"}


def account(job: Job, rounds: Sequence[Sequence[Served]], reused: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """One row for each request and round, in the order of the requests. ``reused`` is what the prefix cache says of each, in the order in
    which they ran; None when there was none. Without a word of it on bytes, they are the KV of the tokens that were restored."""
    told = iter(reused or ())
    rows = []
    for number, served in enumerate(rounds):
        ran = [(k, b, s) for s in served for b, k in enumerate(s.members)]
        facts = {k: dict(next(told, {})) for k, _, _ in ran}
        rows += [_row(job, number, k, b, s, facts[k]) for k, b, s in sorted(ran, key=lambda each: each[0])]
    return rows


def total(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same of all ``rows`` together; the seconds are their median."""
    tiers = {key: {t: sum(row[key][t] for row in rows) for t in LEVELS} for key in ("restored_tokens", "restored_bytes")}
    sums = {key: sum(row[key] for row in rows) for key in ("prompt_tokens", "computed_tokens", "generated_tokens")}
    hit_rate = sum(tiers["restored_tokens"].values()) / sums["prompt_tokens"]
    return {"requests": len(rows), **sums, **tiers, "hit_rate": hit_rate, "ttft_s": median(row["ttft_s"] for row in rows)}


def table(rows: Sequence[Mapping[str, Any]], totals: Mapping[str, Any]) -> Table:
    """The first ``ROWS`` rows, and the totals."""
    drawn = Table(title="requests", title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    drawn.add_column("")
    drawn.add_column("conversation" if any(row["conversation"] for row in rows[:ROWS]) else "")
    for name in ("prompt", *LEVELS.values(), "computed", "restored", "hits", "TTFT", "new"):
        drawn.add_column(name, justify="right")
    several = any(row["round"] for row in rows)
    for row in rows[:ROWS]:
        name = f"{row['round']}.{row['request']}" if several else str(row["request"])
        drawn.add_row(name, _plain(row["conversation"]), *_cells(row))
    if len(rows) > ROWS:
        drawn.add_row(f"and {len(rows) - ROWS} more")
    drawn.add_row("all", "", *_cells(totals))
    return drawn


def _row(job: Job, number: int, k: int, b: int, served: Served, facts: dict[str, Any]) -> dict[str, Any]:
    request, made, prompt = job.requests[k], served.made, len(served.batch.prompts[b])
    restored = dict.fromkeys(LEVELS, 0) | facts.pop("restored_tokens", {})
    nbytes = {tier: tokens * job.plan.model.kv_bytes_per_token for tier, tokens in restored.items()} | facts.pop("restored_bytes", {})
    tokens = sum(restored.values())
    return {
        "round": number,
        "request": k,
        "conversation": request.conversation,
        "prompt_tokens": prompt,
        "cut_tokens": served.cut[b],
        "restored_tokens": restored,
        "computed_tokens": prompt - tokens,
        "restored_bytes": nbytes,
        "hit_rate": tokens / prompt,
        "ttft_s": made.prefill_s + made.first_token_s,
        "max_new_tokens": request.max_new_tokens,
        "generated_tokens": len(made.tokens[b]),
        **facts,
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    restored = [str(row["restored_tokens"][tier]) for tier in LEVELS]
    moved, took = show_bytes(sum(row["restored_bytes"].values())), show_seconds(row["ttft_s"])
    cost = [str(row["computed_tokens"]), moved, f"{row['hit_rate']:.1%}", took]
    return [str(row["prompt_tokens"]), *restored, *cost, str(row["generated_tokens"])]


def _plain(name: str | None) -> str:
    """Printable, short, and with nothing that rich would take for markup."""
    text = "".join(c if c.isprintable() else " " for c in name or "")
    return (text if len(text) <= 24 else f"{text[:21]}...").replace("[", r"\[")
