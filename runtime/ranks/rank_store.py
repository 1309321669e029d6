"""What a rank loads beside its layers: norms, its rows of the LM head, and on rank 0 the embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from torch import nn

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.formats.stored_linear import StoredLinear
from penstock.runtime.model.fixtures import rows_of
from penstock.runtime.model.skeleton import Skeleton
from penstock.runtime.ranks.dealt_model import EmbeddingElsewhere
from penstock.runtime.ranks.expert_slices import slice_of
from penstock.runtime.store.base import Store, UnitLayout
from penstock.runtime.store.decoder import module_name
from penstock.runtime.store.scales import Scale


class ExpertPart(NamedTuple):
    """Slice ``number`` of ``slices``."""

    number: int
    slices: int


@dataclass(frozen=True)
class RankStore:
    """``store``, of which the LM head ``head`` has ``rows`` alone; a tied one gets them of the table ``embedding``."""

    store: Store
    head: str
    embedding: str
    rows: range
    vocab: int
    looks_up: bool
    """Whether this rank has the embedding."""
    part: ExpertPart
    """Of each routed expert."""

    @property
    def directory(self) -> Path:
        return self.store.directory

    @property
    def digest(self) -> str:
        return self.store.digest

    @property
    def scales(self) -> Sequence[Scale]:
        return self.store.scales

    def unit(self, unit: Unit) -> UnitLayout:
        layout, part = self.store.unit(unit), self.part
        return slice_of(layout, part.number, part.slices) if unit.kind == "expert" and part.slices > 1 else layout

    def others(self) -> Mapping[str, UnitLayout]:
        return self._others

    @cached_property
    def _others(self) -> Mapping[str, UnitLayout]:
        found = dict(self.store.others())
        table = found[self.embedding] if self.looks_up else found.pop(self.embedding)
        found.setdefault(f"{self.head}.weight", table)
        return {name: self._cut(name, layout) if name.startswith(f"{self.head}.") else layout for name, layout in found.items()}

    def _cut(self, name: str, layout: UnitLayout) -> UnitLayout:
        if layout.tensors[0].shape[:1] != (self.vocab,):
            return layout
        part = rows_of(layout, self.rows.start, self.rows.stop)
        return replace(part, tensors=(replace(part.tensors[0], name=name),))


def part_of_skeleton(skeleton: Skeleton, rows: range, vocab: int, looks_up: bool, part: ExpertPart) -> Skeleton:
    """``skeleton`` with ``part`` of each routed expert and ``rows`` of its LM head of ``vocab``, no more its embedding's table; and without
    that where this rank does not look up tokens."""
    model = skeleton.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = module_name(model, head), module_name(model, embedding)
    store = RankStore(skeleton.store, names[0], f"{names[1]}.weight", rows, vocab, looks_up, part)
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.data, requires_grad=False)
    if isinstance(head, StoredLinear):
        head.out_features = len(rows)
    bias = getattr(head, "bias", None)
    if bias is not None:
        head.bias = nn.Parameter(bias.data[rows.start : rows.stop], requires_grad=False)
    if not looks_up:
        EmbeddingElsewhere().convert(model)
    return replace(skeleton, store=store)
