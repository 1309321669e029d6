"""A plan in words and bars for a terminal: what was assumed, what each stage allows, what was decided, what it promises."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import cycle
from typing import Any

from rich.console import Console
from rich.text import Text

from planner.decisions import Decisions, ExpertSlots, Tier
from planner.hardware import HardwareProfile
from planner.memory import LEFT_ALONE
from planner.model import Experts
from planner.moe.experts import kept_in_all
from planner.plan import Plan
from planner.reuse import held, kept_set
from planner.stages import Stage, ssd_gbps
from planner.tiers import fills
from planner.units import GB, show_bytes, show_seconds

WIDTH = 80
"""Columns that the output needs at most; a wider terminal is not filled."""

_BAR = 58
_GLYPHS = "█▓▒░▚▪▫◦▞◆◇○"
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_FREE, _KEPT = "·", "x"
STAGES = {Stage.ssd: "SSD read", Stage.h2d: "H2D", Stage.d2h: "D2H", Stage.compute: "compute"}
"""What people call them."""


def make_console() -> Console:
    """A console on stdout, at most ``WIDTH`` columns, with colours only on a terminal."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def print_plan(plan: Plan, console: Console) -> None:
    """Print ``plan`` for a person."""
    _title(plan, console)
    _table(console, "Assumed", _assumed(plan.hardware))
    _stages(plan, console)
    _table(console, "Decided", _decided(plan))
    _tiers(plan, console)
    _prediction(plan, console)
    for note in plan.notes:
        _note(console, note)


def _title(plan: Plan, console: Console) -> None:
    model, work = plan.model, plan.workload
    title = Text(f"{model.name} on {plan.hardware.name}", style="bold")
    title.append(f"  {model.layers} layers, {show_bytes(model.weight_bytes)} of weights", style="not bold")
    _line(console, title)
    _line(console, Text(
        f"{work.name}: {work.prompt_tokens} prompt + {work.new_tokens} new tokens, batch {plan.decisions.batch}, "
        f"{work.requests} request{'s' * (work.requests != 1)}, for {work.objective}", style="dim",
    ))


def _head(console: Console, name: str, rest: str = "") -> None:
    console.print()
    _line(console, Text(name, style="bold").append(rest, style="not bold dim"))


def _line(console: Console, text: Text) -> None:
    text.rstrip()
    console.print(text, overflow="ellipsis", no_wrap=True, crop=True)


def _note(console: Console, note: str) -> None:
    """Notes are whole sentences: wrapped, and a path that is longer than a line is left in one piece."""
    lines = textwrap.wrap(f"note: {note}", console.width, initial_indent="  ", subsequent_indent="    ", break_long_words=False,
                          break_on_hyphens=False)
    for line in lines:
        console.print(Text(line, style="dim"), soft_wrap=True)


def _table(console: Console, name: str, rows: Iterator[tuple[str, str, str]]) -> None:
    _head(console, name)
    for label, value, remark in rows:
        _line(console, Text(f"  {label:<11} ").append(f"{value:<22} ").append(remark, style="dim"))


def _assumed(hardware: HardwareProfile) -> Iterator[tuple[str, str, str]]:
    gpu, origin = hardware.gpu, hardware.origin

    def from_(path: str) -> str:
        parts = path.split(".")
        return next((origin[key] for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in origin), "")

    best = max(hardware.ssd_read, key=lambda p: p.gbps)
    if gpu:
        yield "VRAM", show_bytes(hardware.vram_bytes), from_("vram_bytes")
    yield "DRAM", show_bytes(hardware.dram_bytes), from_("dram_bytes")
    yield "SSD", show_bytes(hardware.ssd_bytes), from_("ssd_bytes")
    yield "SSD read", f"up to {best.gbps:.3g} GB/s", from_("ssd.read")
    if gpu:
        if gpu.ssd_while_h2d_gbps:
            yield "  with H2D", f"up to {gpu.ssd_while_h2d_gbps:.3g} GB/s", from_("gpu.ssd_while_h2d_gbps")
        yield "H2D", f"{gpu.h2d.peak:.3g} GB/s", from_("gpu.h2d")
        yield "  with SSD", f"{gpu.h2d_while_ssd_gbps:.3g} GB/s", from_("gpu.h2d_while_ssd_gbps")
        yield "weights", f"{gpu.memory_gbps:.4g} GB/s from VRAM", from_("gpu.memory_gbps")
        yield "matrices", f"{gpu.dense_tflops:.3g} TFLOP/s", from_("gpu.dense_tflops")
        yield "attention", f"{gpu.attention_tflops:.3g} TFLOP/s", from_("gpu.attention_tflops")
    else:
        yield "weights", f"{hardware.cpu_matvec_gbps:.3g} GB/s from DRAM", from_("cpu.matvec_gbps")
        yield "matrices", f"{hardware.cpu_dense_tflops:.3g} TFLOP/s", from_("cpu.dense_tflops")
    yield "locking", f"{hardware.pin_s_per_gb:.2g} s/GB", from_("dram.pin_s_per_gb")


def _stages(plan: Plan, console: Console) -> None:
    predicted, batch = plan.predicted, plan.decisions.batch
    _head(console, "Ceilings", ", each stage alone")
    _line(console, Text(f"  {'':<11} {'prefill':>10} {'decode/token':>13} {'tokens/s':>10} {'bytes/token':>12} {'GB/s':>7}", style="dim"))
    moved = {Stage.ssd: predicted.ssd_bytes_per_token, Stage.h2d: predicted.h2d_bytes_per_token}
    for stage, name in STAGES.items():
        prefill, decode = predicted.prefill_stages[stage], predicted.decode_stages[stage]
        if not prefill and not decode:
            continue
        nbytes = moved.get(stage, 0)
        rate = f"{batch / decode:.3g}" if decode else "-"
        flow = f"{show_bytes(nbytes):>12} {nbytes / decode / GB:>7.3g}" if nbytes and decode else ""
        row = Text(f"  {name:<11} ").append(f"{show_seconds(prefill):>10}", _slowest(stage == predicted.bottleneck_prefill))
        row.append(f" {show_seconds(decode):>13} {rate:>10}", _slowest(stage == predicted.bottleneck_decode))
        _line(console, row.append(f" {flow}".rstrip()))


def _slowest(slowest: bool) -> str:
    return "bold yellow" if slowest else ""


def _decided(plan: Plan) -> Iterator[tuple[str, str, str]]:
    d, layers = plan.decisions, plan.model.layers
    w, placement, gpu = d.weights, plan.placement, plan.hardware.gpu is not None
    through, from_ssd = len(placement.dram_layers), len(placement.ssd_layers)
    yield "policy", str(w.policy), f"{layers - through} layers in VRAM, {through - from_ssd} in DRAM, {from_ssd} from SSD"
    if gpu:
        kept = w.vram.resident_units
        head = f"{kept.head} of {w.head_blocks} LM-head blocks; embedding in {w.embedding}"
        yield "VRAM", f"{kept.attn} attn + {kept.ffn} ffn kept", head
        yield "VRAM ring", f"{w.vram.slots} slots", f"{w.vram.prefetch_distance} units ahead"
    cache = w.dram
    ahead = f"{cache.prefetch_distance} layers ahead, {cache.resident_layers} kept"
    yield "DRAM cache", f"cap {cache.cap_layers}, HWM {cache.hwm_layers}", ahead
    ssd, rate = w.ssd, ssd_gbps(plan.hardware, w.ssd.block_bytes, w.ssd.queue_depth)
    yield "SSD reads", f"{_binary(ssd.block_bytes)} x {ssd.queue_depth}", f"{rate:.3g} GB/s, staging {_binary(ssd.staging_bytes)}"
    if gpu:
        yield "H2D copies", f"{_binary(w.h2d.chunk_bytes)} x {w.h2d.in_flight}", ""
    tiers = ", ".join(f"{d.kv.of(tier)} in {str(tier).upper()}" for tier in Tier if d.kv.of(tier))
    yield "KV", f"pages of {d.kv.page_tokens} tokens", f"{d.kv.pages // plan.model.layers} a layer: {tiers}"
    if plan.workload.kept_tokens:
        kept = kept_set(plan.workload, d.kv.page_tokens)
        pages = ", ".join(f"{n} {tier.upper()}" for tier, n in held(plan.model, d.kv, kept).items() if n) or "none"
        files = f"; files {show_bytes(d.kv.reuse.ssd_bytes)}" if d.kv.reuse.ssd_bytes else ""
        yield "KV kept", f"{kept.pages} pages", pages + files
    if d.experts and plan.model.experts:
        yield from _experts(plan, d.experts, plan.model.experts)
    yield "prefill", f"{d.prefill_chunk_tokens} tokens a pass", f"batch {d.batch}"


def _experts(plan: Plan, slots: ExpertSlots, experts: Experts) -> Iterator[tuple[str, str, str]]:
    gpu, p = plan.hardware.gpu is not None, plan.predicted
    rows = [("DRAM", slots.dram_slots, p.experts_missed_dram)]
    if gpu:
        rows.insert(0, ("VRAM", slots.vram_slots, p.experts_missed_vram))
    yield "experts", ", ".join(f"{n} in {tier}" for tier, n, _ in rows), f"slots, for {experts.units} experts; policy {slots.policy}"
    kept = ", ".join(f"{kept_in_all(experts, n)} in {tier}" for tier, n, _ in rows)
    yield "  kept", kept, f"decode misses {', '.join(f'{share:.1%} in {tier}' for tier, _, share in rows)}"
    if gpu:
        ahead = f"{slots.prefetch} ahead, {slots.in_flight} in flight"
        yield "  copies", f"{_binary(slots.chunk_bytes)} chunks", ahead if slots.prefetch else "none ahead of the router"


def _binary(nbytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"


def _tiers(plan: Plan, console: Console) -> None:
    _head(console, "Tiers", ", each filled to scale")
    for fill in fills(plan):
        bar, legend = _bar(fill.items, fill.capacity_bytes)
        scale = f" {fill.taken_bytes / GB:.3g}/{fill.capacity_bytes / GB:.4g} GB"
        _line(console, Text(f"  {fill.tier.upper():<5}").append(bar).append(scale))
        for text in legend:
            _line(console, Text(" " * 7).append(text))


def _bar(use: Mapping[str, int], capacity: int) -> tuple[Text, list[Text]]:
    """The bar of one tier and the lines of its legend. Cells are shared out by cumulated bytes, so they never overflow."""
    bar, legend, line = Text(), [], Text()
    total, end = 0, 0
    looks = zip(_GLYPHS, cycle(_COLOURS), strict=False)
    for item, nbytes in use.items():
        glyph, colour = (_KEPT, "dim") if item in LEFT_ALONE else next(looks)
        total += nbytes
        cells = min(_BAR, round(_BAR * total / capacity)) if capacity else 0
        bar.append(glyph * (cells - end), colour)
        end = max(end, cells)
        entry = Text(glyph, colour).append(f" {item.replace('_', ' ')} {show_bytes(nbytes)}  ", "default")
        if len(line) + len(entry) > WIDTH - 8:
            legend.append(line)
            line = Text()
        line.append(entry)
    bar.append(_FREE * (_BAR - end), "dim")
    return bar, [*legend, line]


def _prediction(plan: Plan, console: Console) -> None:
    p = plan.predicted
    _head(console, "Predicted")
    rows = (
        ("load", show_seconds(p.load_s), "once, before the first request"),
        ("first token", show_seconds(p.ttft_s), _of_prefill(plan)),
        ("decode", f"{show_seconds(p.decode_s_per_token)} a token", f"bound by {STAGES[p.bottleneck_decode]}"),
        ("", f"{p.decode_tokens_per_s:.3g} tokens/s", f"all {plan.decisions.batch} sequences together" if plan.decisions.batch > 1 else ""),
    )
    for label, value, remark in rows:
        _line(console, Text(f"  {label:<11} ").append(f"{value:<22} ", "bold green").append(remark, style="dim"))
    for sentence in filter(None, (_likely(plan), _verdict(plan), _restoring(plan))):
        for line in textwrap.wrap(sentence, console.width, initial_indent="  ", subsequent_indent="  "):
            _line(console, Text(line))


def _of_prefill(plan: Plan) -> str:
    p = plan.predicted
    if p.restored_tokens:
        return f"restoring {p.restored_tokens} tokens takes {show_seconds(p.restore_s)}"
    return f"prefill {show_seconds(p.prefill_s)}, bound by {STAGES[p.bottleneck_prefill]}"


def _likely(plan: Plan) -> str:
    """Between what the predicted seconds lie."""
    ranges = plan.intervals
    named = (("load", ranges.load_s), ("prefill", ranges.prefill_s), ("decode", ranges.decode_s_per_token))
    return "Nine runs in ten: " + ", ".join(f"{name} {show_seconds(least)} to {show_seconds(most)}" for name, (least, most) in named) + "."


def _restoring(plan: Plan) -> str:
    """From how many tokens on a prompt's head is better restored than computed."""
    if not plan.workload.kept_tokens:
        return ""
    tiers: dict[int | None, list[str]] = {}
    for tier in Tier:
        if tier is not Tier.vram or plan.hardware.gpu:
            tiers.setdefault(plan.break_even.of(tier), []).append(tier.upper())
    pays = (
        f"restoring from {' or '.join(names)} " + ("never pays" if tokens is None else f"pays from {tokens} tokens on")
        for tokens, names in tiers.items()
    )
    return f"Of a prompt of {plan.workload.prompt_tokens} tokens: {', '.join(pays)}."


def _verdict(plan: Plan) -> str:
    """What to say when nothing is streamed."""
    placement = plan.placement
    units, slots = (plan.model.experts.units if plan.model.experts else 0), plan.decisions.experts
    in_vram, in_dram = (slots.vram_slots >= units, slots.dram_slots >= units) if slots else (True, True)
    if plan.hardware.gpu and not placement.streamed_units and in_vram:
        return "Everything fits in VRAM: streaming buys nothing here. The plan loads once."
    if not placement.ssd_layers and (in_vram or in_dram):
        return "Everything fits in DRAM: nothing is read from the SSD after loading."
    return ""


def summary(plan: Plan, out: str) -> dict[str, object]:
    """The JSON line: what was asked, decided and promised. What was assumed of the machine is in the plan file."""
    p, d = plan.predicted, plan.decisions
    return {
        "plan": out,
        "hardware": plan.hardware.name,
        "model": plan.model.name,
        "workload": plan.workload.name,
        "batch": d.batch,
        "policy": str(d.weights.policy),
        "layers": _layers(d, plan),
        "predicted": _short({name: value for name, value in vars(p).items() if not isinstance(value, dict)}),
        "nine_in_ten": {name: [float(f"{s:.6g}") for s in ends] for name, ends in vars(plan.intervals).items()},
        "stages": {phase: _short(getattr(p, f"{phase}_stages")) for phase in ("prefill", "decode")},
        "decided": asdict(d),
        "tiers": {fill.tier: {"capacity_bytes": fill.capacity_bytes, "items": fill.items} for fill in fills(plan)},
        "notes": list(plan.notes),
    }


def _short(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Six figures are enough."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in figures.items()}


def _layers(decisions: Decisions, plan: Plan) -> dict[str, int]:
    placement = plan.placement
    through, from_ssd = len(placement.dram_layers), len(placement.ssd_layers)
    return {"vram": plan.model.layers - through, "dram": through - from_ssd, "ssd": from_ssd}
