"""How much memory the reuse of prefixes takes in a run, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import dram_use, used_bytes
from penstock.planner.contract.prices.sizes import kept_page_bytes, kv_bounce_bytes
from penstock.runtime.asked.kv_place import directory, folder_of_rank
from penstock.runtime.asked.run_schema import ReuseConfig

USUAL_LIMIT_BYTES = 10 << 30
"""Of a directory, where neither the user nor the plan says how much."""
USUAL_STAGING_BYTES = 64 << 20
"""Of DRAM, where neither says how much."""
LEAST_DRAM_PAGES = 2
"""One is read into while another is copied from."""


@dataclass(frozen=True)
class PageRoom:
    """Pages of all layers that memory is taken for; none at all without reuse."""

    page_bytes: int = 0
    dram_pages: int = 0
    bounce_pages: int = 0
    """In VRAM, on their way."""
    vram_pages: int = 0
    """Of the pool, beside those of the running sequences."""

    @property
    def dram_bytes(self) -> int:
        return self.dram_pages * self.page_bytes

    @property
    def vram_bytes(self) -> int:
        """Beside the pool."""
        return self.bounce_pages * self.page_bytes


def is_reused(cfg: ReuseConfig, plan: Plan) -> bool:
    """Whether a run keeps pages: in a directory that is named, or in memory that is planned for them."""
    reuse = plan.decisions.kv.reuse
    return cfg.dir is not None or reuse.dram_pages > 0 or (reuse.vram_pages > 0 and plan.hardware.gpu is not None)


def limit_bytes(cfg: ReuseConfig, plan: Plan) -> int:
    """What the directory's pages take at most."""
    if cfg.limit_bytes is not None:
        return cfg.limit_bytes
    return plan.decisions.kv.reuse.ssd_bytes or USUAL_LIMIT_BYTES


def page_room(cfg: ReuseConfig, plan: Plan) -> PageRoom:
    """As the plan decided. Where it decided nothing, pages pass through ``staging_bytes`` of DRAM and, with a GPU, one page of VRAM: both
    on top of the plan's."""
    if not is_reused(cfg, plan):
        return PageRoom()
    kv, hardware = plan.decisions.kv, plan.hardware
    page_bytes = kept_page_bytes(plan.model, kv.page_tokens)
    staging_bytes = USUAL_STAGING_BYTES if cfg.staging_bytes is None else cfg.staging_bytes
    dram_pages = kv.reuse.dram_pages or staging_bytes // page_bytes
    bounce_pages = kv_bounce_bytes(plan.model, kv) // page_bytes or 1
    on_card = (bounce_pages, kv.reuse.vram_pages) if hardware.gpu else (0, 0)
    return PageRoom(page_bytes, max(LEAST_DRAM_PAGES, dram_pages), *on_card)


def reuse_of_rank(cfg: ReuseConfig, plan: Plan, rank: int) -> ReuseConfig:
    """``cfg`` for ``rank`` of ``plan``: a folder of its own in the directory, and its layers' part of the bytes. Null DRAM becomes what
    it means. ``cfg`` itself of one rank."""
    if plan.ranks.count == 1:
        return cfg
    own = plan.of_rank(rank)

    def part(nbytes: int | None) -> int | None:
        return None if nbytes is None else nbytes * own.model.layers // plan.model.layers

    planned = own.decisions.kv.reuse.ssd_bytes
    limit = USUAL_LIMIT_BYTES if cfg.limit_bytes is None and not planned else cfg.limit_bytes
    place = None if cfg.dir is None else str(folder_of_rank(directory(cfg.dir), rank, plan.ranks.count))
    return fitted(replace(cfg, dir=place, limit_bytes=part(limit), staging_bytes=part(cfg.staging_bytes)), own)


def rooms(cfg: ReuseConfig, plan: Plan) -> tuple[PageRoom, ...]:
    """Of each rank of ``plan``. The pool has as many pages on all; where one has no room, none has."""
    each = [page_room(reuse_of_rank(cfg, plan, rank), plan.of_rank(rank)) for rank in range(plan.ranks.count)]
    if not all(room.dram_pages for room in each):
        return (PageRoom(),) * len(each)
    pool = min(room.vram_pages for room in each)
    return tuple(replace(room, vram_pages=pool) for room in each)


def left_dram_bytes(plan: Plan) -> int:
    """Of ``hardware.dram_bytes``, what a run of ``plan`` without a directory leaves."""
    return plan.hardware.dram_bytes - used_bytes(dram_use(plan.hardware, plan.model, plan.workload, plan.decisions))


def fitted(cfg: ReuseConfig, plan: Plan) -> ReuseConfig:
    """``cfg`` with the bytes of DRAM that null means beside ``plan``, which has been planned and not yet predicted for its requests. Each
    of several ranks has its own: :func:`reuse_of_rank`."""
    if cfg.dir is None or cfg.staging_bytes is not None or plan.ranks.count > 1:
        return cfg
    return replace(cfg, staging_bytes=max(0, min(USUAL_STAGING_BYTES, left_dram_bytes(plan))))


def unplanned_dram_bytes(cfg: ReuseConfig, plan: Plan, rank: int = 0) -> int:
    """DRAM of ``page_room`` that the plan's own arena, or that of one ``rank``, has no place for."""
    own = plan.of_rank(rank)
    room = page_room(reuse_of_rank(cfg, plan, rank), own)
    return max(0, room.dram_pages - own.decisions.kv.reuse.dram_pages) * room.page_bytes
