"""Rules of KV pages: those of running sequences, and those kept for prompts to come."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.decided.decisions import Decisions, Tier
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.sizes import kept_file_bytes, kept_file_pages, kv_page_bytes, pool_pages
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.contract.rules.rule import BrokenRule
from penstock.planner.contract.rules.setting import HOST


def kv_rules(hardware: HardwareProfile, model: ModelSpec, workload: Workload, d: Decisions) -> Iterator[BrokenRule]:
    """Where each number of ``d`` is within its range."""
    kv = d.kv
    if kv.ssd_pages and kv.page_tokens < LIMITS.ssd_page_tokens_min:
        yield BrokenRule(
            "KV page size on SSD",
            f"kv.page_tokens={kv.page_tokens} with kv.ssd_pages={kv.ssd_pages}; allowed: {LIMITS.ssd_page_tokens_min} or more when KV "
            f"spills to SSD; set page_tokens={LIMITS.ssd_page_tokens_min} or ssd_pages=0",
        )
    home = "vram_pages" if hardware.gpu else "dram_pages"
    for name in ("vram_pages", "dram_pages", "ssd_pages"):
        value = getattr(kv, name)
        if value > 0 and name != home and (not workload.kv_spill or name == "vram_pages"):
            yield BrokenRule(
                "KV tier",
                f"kv.{name}={value}; allowed: 0, since KV lives in kv.{home}"
                + ("; set workload.kv_spill=true" if name != "vram_pages" else " without a GPU; set it to 0"),
            )
    kept = {name: getattr(kv.reuse, name) for name in ("vram_pages", "dram_pages", "ssd_bytes")}
    moved = {f"kv.reuse.{name}": n for name, n in kept.items()} | {
        f"kv.{n}": getattr(kv, n) for n in ("dram_pages", "ssd_pages") if n != home
    }
    for name, value in moved.items():
        if value > 0 and not model.kv_moves:
            yield BrokenRule("KV that stays", f"{name}={value}; allowed: 0, since {model.kv_stays_because}; set it to 0")
    a_layer = max(1, -(-kv.pages // model.layers))
    for tier in Tier:
        pages = kv.of(tier)
        if pages % a_layer:
            yield BrokenRule(
                "KV layer by layer",
                f"kv.{tier}_pages={pages} of {kv.pages} in {model.layers} layers; allowed: whole layers, multiples of {a_layer}; "
                f"set it to {-(-pages // a_layer) * a_layer}",
            )
    yield from _kv_reuse(model, d)
    if kv.host_layers and workload.is_served:
        yield BrokenRule(
            HOST,
            f"kv.host_layers={kv.host_layers}; allowed: 0, since a server's passes mix prompts and rows; set host_layers=0",
        )
    need = model.layers * pool_pages(workload, d.batch, kv.page_tokens)
    if kv.pages < need:
        yield BrokenRule(
            "KV pages for the workload",
            f"kv pages={kv.pages} of {kv.page_tokens} tokens; allowed: at least {need} for {model.layers} layers and batch {d.batch} of "
            f"{workload.max_tokens} tokens; raise kv.{home}",
        )


def _kv_reuse(model: ModelSpec, d: Decisions) -> Iterator[BrokenRule]:
    kv, reuse = d.kv, d.kv.reuse
    if kv.ssd_pages > 0 and max(reuse.vram_pages, reuse.dram_pages, reuse.ssd_bytes) > 0:
        yield BrokenRule(
            "no kept KV beside KV on the SSD",
            f"kv.ssd_pages={kv.ssd_pages} with kv.reuse.dram_pages={reuse.dram_pages}, vram_pages={reuse.vram_pages}, "
            f"ssd_bytes={reuse.ssd_bytes}; allowed: one of both; solve again with workload.kept_tokens=0",
        )
    if reuse.ssd_bytes <= 0:
        return
    layer = kv_page_bytes(model, kv.page_tokens)
    if kv.page_tokens < LIMITS.ssd_page_tokens_min or layer % ALIGN:
        least = (t for t in LIMITS.page_tokens if t >= LIMITS.ssd_page_tokens_min and not kv_page_bytes(model, t) % ALIGN)
        fit = next(least, None)
        yield BrokenRule(
            "kept KV page size on SSD",
            f"kv.page_tokens={kv.page_tokens} with kv.reuse.ssd_bytes={reuse.ssd_bytes} makes pages of {layer} bytes a layer; allowed: "
            f"multiples of {ALIGN} and {LIMITS.ssd_page_tokens_min} tokens or more; "
            + ("set ssd_bytes=0" if fit is None else f"set page_tokens={fit} or ssd_bytes=0"),
        )
    elif kept_file_pages(model, kv) < 1:
        yield BrokenRule(
            "kept KV bytes on SSD",
            f"kv.reuse.ssd_bytes={reuse.ssd_bytes} holds no page; allowed: 0, or at least {kept_file_bytes(model, kv.page_tokens, 1)}; "
            "set one of these",
        )
