"""What a run's reuse of prefixes works with: pages of its model's shape, and the directory that keeps them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.sizes import OVERHEADS, kv_page_bytes
from penstock.runtime.asked.kv_place import directory
from penstock.runtime.asked.page_room import limit_bytes, page_room
from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.kv.disk.disk_pages import DiskReader
from penstock.runtime.kv.disk.kept_rate import measure, measure_reading
from penstock.runtime.kv.disk.model_names import record_name
from penstock.runtime.kv.disk.origin import pages_namespace
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.disk.page_writer import DiskWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def page_shape(plan: Plan, checkpoint: Path, model: PreTrainedModel) -> PageShape:
    """Pages of ``model``, or of a rank's layers of it. UserError where its KV does not make pages."""
    _refuse_strange(model)
    tokens = plan.decisions.kv.page_tokens
    namespace = pages_namespace(checkpoint, str(model.dtype), tokens, plan.model.dealt)
    return PageShape(namespace, tokens, plan.model.layers, kv_page_bytes(plan.model, tokens))


def open_pages(cfg: ReuseConfig, plan: Plan, shape: PageShape) -> DiskReader | DiskWriter:
    """The directory for pages of ``shape``: locked for this process until it is closed, unless it is only to be read. UserError."""
    if cfg.dir is None:
        raise RuntimeError("no directory for pages was asked for")
    place = directory(cfg.dir)
    if cfg.read_only:
        return DiskReader(place, shape)
    limit = limit_bytes(cfg, plan)
    segment_bytes = min(max(OVERHEADS.kv_segment_bytes, shape.record_bytes), limit // 2)
    pages = DiskWriter(place, shape, limit, segment_bytes, queue_pages=page_room(cfg, plan).dram_pages)
    record_name(place, shape.namespace, plan.model.name)
    return pages


def read_gbps(cfg: ReuseConfig) -> float:
    """The rate of one thread that reads from the directory, GB/s; infinite without one, or where one that is only read holds nothing."""
    if cfg.dir is None:
        return math.inf
    if cfg.read_gbps is not None:
        return cfg.read_gbps
    place = directory(cfg.dir)
    return measure_reading(place) if cfg.read_only else measure(place).read_gbps


def _refuse_strange(model: PreTrainedModel) -> None:
    """UserError where a layer keeps something else than keys and values."""
    from penstock.runtime.kv.batch.kv_windows import windows

    layers = windows(model.config)
    strange = next((i for i in range(model.config.get_text_config(decoder=True).num_hidden_layers) if i not in layers), None)
    if strange is not None:
        raise UserError(f"kv.dir: layer {strange} of the model keeps no keys and values that make pages; leave kv.dir out")
