"""A simulation in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.common.timeline.spans import COMPUTE, CPU, D2H, EXPERTS, H2D, HOP, KV, LAUNCH, SSD, SSD_WRITE
from penstock.planner.simulate.outcome import FIGURES, PHASES, Told

_NAMES = {
    "ttft_s": "first token", "prefill_s": "prefill", "decode_s_per_token": "decode a token", "decode_tokens_per_s": "tokens/s",
    "ssd_bytes_per_token": "SSD a token", "h2d_bytes_per_token": "H2D a token",
}  # fmt: skip
_TRACKS = {
    COMPUTE: "compute", CPU: "CPU", H2D: "H2D", KV: "H2D of KV", EXPERTS: "H2D of experts",
    D2H: "D2H of KV", SSD: "SSD read", SSD_WRITE: "SSD write", HOP: "hops", LAUNCH: "launching",
}  # fmt: skip


def print_told(told: Told, before: Told | None, console: Console) -> None:
    """Print ``told`` and, where a plan was changed, what it was ``before``."""
    plan = told.plan
    work = plan.workload
    console.print(Text(f"{plan.model.name} on {plan.hardware.name}, simulated", style="bold"))
    console.print(Text(f"{work.prompt_tokens} prompt + {work.new_tokens} new tokens, batch {plan.decisions.batch}", style="dim"))
    _figures(told, before, console)
    _cache(told, before, console)
    _experts(told, console)
    _busy(told, console)
    _waits(told, console)
    if before is not None:
        _damage(told, before, console)


def _figures(told: Told, before: Told | None, console: Console) -> None:
    heads = ["simulated", "predicted", "ratio"] + (["before"] if before else [])
    _head(console, "A request", heads)
    for name in FIGURES:
        value, closed = told.figures[name], told.closed(name)
        ratio = f"{closed / value:.3f}" if value and closed is not None else "-"
        cells = [_show(name, value), _show(name, closed), ratio] + ([_show(name, before.figures[name])] if before else [])
        _row(console, _NAMES[name], cells)


def _cache(told: Told, before: Told | None, console: Console) -> None:
    all_ = [told] + ([before] if before else [])
    _head(console, "DRAM cache", ["in all"] + (["before"] if before else []))
    rows: dict[str, Sequence[object]] = {
        "loads": [t.acted.cache.loads for t in all_],
        "evictions": [t.acted.cache.evictions_out_of_window + t.acted.cache.evictions_in_window for t in all_],
        "  in window": [t.acted.cache.evictions_in_window for t in all_],
        "shrinks": [t.acted.cache.shrinks for t in all_],
        "waits": [t.acted.cache.waits for t in all_],
        "layers held": [" to ".join(map(str, t.acted.record.held)) or "none" for t in all_],
    }
    for name, values in rows.items():
        _row(console, name, [str(value) for value in values])


def _experts(told: Told, console: Console) -> None:
    found = told.acted.experts
    if not found:
        return
    _head(console, "Experts", ["hits", "misses", "ahead", "used"])
    for tier, counts in found.items():
        _row(console, tier.upper(), [str(n) for n in (counts.hits, counts.misses, counts.ahead, counts.ahead_used)])


def _busy(told: Told, console: Console) -> None:
    _head(console, "Busy", [*PHASES])
    for track, name in _TRACKS.items():
        shares = [told.busy(phase, track) for phase in PHASES]
        if any(shares):
            _row(console, name, [f"{share:.1%}" for share in shares])


def _waits(told: Told, console: Console) -> None:
    waits = told.waits()
    if not waits:
        return
    _head(console, "Waited", ["times", "seconds"])
    for key, (times, seconds) in waits.items():
        who, _, whom = key.partition(" waits for ")
        _row(console, f"{_TRACKS[who]} for {_TRACKS[whom]}", [str(times), f"{seconds:.4g}"])


def _damage(told: Told, before: Told, console: Console) -> None:
    more_bytes, more_s = told.read_bytes - before.read_bytes, told.total_s - before.total_s
    read, lasts = _signed(more_bytes, show_bytes(abs(more_bytes))), _signed(more_s, show_seconds(abs(more_s)))
    line = f"The change costs {read} read from the SSD and {lasts}, in a workload of {show_seconds(before.total_s)} before."
    console.print()
    console.print(Text(line, style="bold"), soft_wrap=True)


def _signed(value: float, shown: str) -> str:
    return f"{'-' if value < 0 else '+'}{shown}"


def _show(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("bytes_per_token"):
        return show_bytes(value)
    return f"{value:.4g}" if name == "decode_tokens_per_s" else show_seconds(value)


def _head(console: Console, name: str, columns: list[str]) -> None:
    console.print()
    console.print(Text(f"{name:<20}", style="bold").append("".join(f"{column:>14}" for column in columns), style="not bold dim"))


def _row(console: Console, name: str, cells: list[str]) -> None:
    console.print(Text(f"  {name:<18}").append("".join(f"{cell:>14}" for cell in cells)))
