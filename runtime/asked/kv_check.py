"""Whether a run can keep KV pages where it was asked to, without torch and without numpy."""

from __future__ import annotations

import math
import os
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN, show_bytes
from penstock.planner.common.output import takes_files
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.checkpoint.gguf_checkpoint import files_beside
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.sizes import kv_page_bytes
from penstock.planner.contract.rules.limits import LIMITS
from penstock.runtime.asked.kv_place import directory
from penstock.runtime.asked.page_room import (
    LEAST_DRAM_PAGES,
    fitted,
    is_reused,
    left_dram_bytes,
    limit_bytes,
    page_room,
    unplanned_dram_bytes,
)
from penstock.runtime.asked.run_schema import ReuseConfig


def check_reuse(cfg: ReuseConfig, plan: Plan) -> None:
    """UserError for whatever is wrong with ``cfg``, or keeps the plan's pages from lying on a disk."""
    if cfg.read_only and cfg.dir is None:
        raise UserError("kv.read_only=true: there is no directory to read; set kv.dir, or leave it out")
    check_bounds(cfg)
    if not is_reused(cfg, plan):
        return
    if plan.decisions.kv.ssd_pages:
        on_ssd = plan.decisions.kv.ssd_pages
        raise UserError(f"kv: prefixes cannot be reused while {on_ssd} pages of the running batch lie on the SSD; leave kv.dir out")
    if cfg.dir is not None and not cfg.dir.strip():
        raise UserError("kv.dir=: no directory; name one, or leave it out")
    layer_bytes, tokens = kv_page_bytes(plan.model, plan.decisions.kv.page_tokens), plan.decisions.kv.page_tokens
    if layer_bytes % ALIGN:
        fit = next((t for t in LIMITS.page_tokens if not kv_page_bytes(plan.model, t) % ALIGN), None)
        remedy = "leave kv.dir out" if fit is None else f"set force.page_tokens={fit}"
        raise UserError(f"kv.dir: a page of {tokens} tokens is {layer_bytes} bytes a layer, a disk needs multiples of {ALIGN}; {remedy}")
    if cfg.dir is None:
        return
    _refuse_too_much(cfg, plan)
    if cfg.read_only:
        _refuse_unreadable(directory(cfg.dir))
        return
    limit = limit_bytes(cfg, plan)
    least = 2 * (ALIGN + plan.model.layers * layer_bytes)
    if limit < least:
        raise UserError(f"kv.limit_bytes={limit}: two pages take {least}; raise it")
    _refuse_unwritable(directory(cfg.dir))


def check_bounds(cfg: ReuseConfig) -> None:
    """UserError for a number that means nothing, also where nothing is kept yet."""
    for name in ("staging_bytes", "limit_bytes"):
        value = getattr(cfg, name)
        if value is not None and value < 0:
            raise UserError(f"kv.{name}={value}: must be 0 or more; raise it")
    if not 0 <= cfg.flush_s < math.inf:
        raise UserError(f"kv.flush_s={cfg.flush_s}: must be 0 or more seconds; 0 waits for no page")
    if cfg.read_gbps is not None and not 0 < cfg.read_gbps < math.inf:
        raise UserError(f"kv.read_gbps={cfg.read_gbps}: must be above 0; leave it out to measure it")


def _refuse_too_much(cfg: ReuseConfig, plan: Plan) -> None:
    """UserError where pages would pass through more DRAM than the plan leaves of its budget."""
    taken, left = unplanned_dram_bytes(fitted(cfg, plan), plan), left_dram_bytes(plan)
    if taken > max(0, left):
        room = page_room(fitted(cfg, plan), plan)
        least = LEAST_DRAM_PAGES * room.page_bytes
        remedy = f"set kv.staging_bytes={left}, or " if cfg.staging_bytes is not None and left >= least else ""
        raise UserError(
            f"kv.dir: pages pass through {show_bytes(taken)} of DRAM, and the plan leaves {show_bytes(max(0, left))} of "
            f"hardware.dram_bytes={plan.hardware.dram_bytes}; {remedy}solve again with workload.dram_reserve_bytes={max(taken, least)}"
        )


def check_scratch(cfg: ReuseConfig, plan: Plan, checkpoint: Path) -> None:
    """UserError where the running batch's KV is to lie on the SSD and the directory for it takes no file."""
    place = files_beside(checkpoint) if cfg.scratch_dir is None else user_path(cfg.scratch_dir)
    if (plan.decisions.kv.ssd_pages or cfg.scratch_dir is not None) and not takes_files(place):
        raise UserError(f"kv.scratch_dir={place}: not a directory that can be written to, for KV on the SSD; name another one")


def _refuse_unreadable(place: Path) -> None:
    if not place.is_dir() or not os.access(place, os.R_OK | os.X_OK):
        raise UserError(f"kv.dir={place}: not a directory that can be read; name one that holds pages, or leave kv.read_only out")


def _refuse_unwritable(wanted: Path) -> None:
    place = next(p for p in (wanted.absolute(), *wanted.absolute().parents) if os.path.lexists(p))
    if not takes_files(place):
        raise UserError(f"kv.dir={wanted}: {place} is not a directory that can be written to; name another kv.dir=")
