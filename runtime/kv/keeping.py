"""The directory where a run keeps KV pages, opened for its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import UserError
from planner.memory import kv_page_bytes
from planner.plan import Plan
from runtime.kv.names import record_name
from runtime.kv.origin import pages_namespace
from runtime.kv.place import directory
from runtime.kv.rate import measure
from runtime.kv.record import PageShape
from runtime.kv.writer import DiskWriter
from runtime.schema import ReuseConfig

if TYPE_CHECKING:
    from torch import nn

SEGMENT_BYTES = 256 << 20
"""Of one file of pages, and what is evicted at once; half the limit where that is less."""


def open_pages(cfg: ReuseConfig, plan: Plan, checkpoint: Path, model: nn.Module) -> DiskWriter:
    """The directory for the KV pages of ``model``, locked for this process until it is closed. UserError, also where the model has
    layers whose KV are not full pages."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    for i, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) is not DynamicLayer:
            raise UserError(f"kv.dir: layer {i} of the model keeps its KV as {type(layer).__name__}, not as full pages; leave kv.dir out")
    place, tokens = directory(cfg.dir), plan.decisions.kv.page_tokens
    namespace = pages_namespace(checkpoint, str(model.dtype), tokens)
    shape = PageShape(namespace, tokens, plan.model.layers, kv_page_bytes(plan.model, tokens))
    segment_bytes = min(max(SEGMENT_BYTES, shape.record_bytes), cfg.limit_bytes // 2)
    queue_pages = 2 + cfg.staging_bytes // shape.payload_bytes
    pages = DiskWriter(place, shape, cfg.limit_bytes, segment_bytes, queue_pages)
    record_name(place, namespace, plan.model.name)
    return pages


def read_gbps(cfg: ReuseConfig) -> float:
    """The rate of one thread that reads from the directory, GB/s."""
    return measure(directory(cfg.dir)).read_gbps if cfg.read_gbps is None else cfg.read_gbps
