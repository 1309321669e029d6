"""What never moves during a run: norms, tables, resident units. Each with its tier and the parameters that it feeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.planner.common.measures import ALIGN, align_up
from penstock.planner.contract.decided.decisions import Tier, WeightForm
from penstock.planner.contract.decided.placement import Placement, Unit
from penstock.runtime.model.binding import bind
from penstock.runtime.model.cast import Cast
from penstock.runtime.model.decoded import DecodedUnit
from penstock.runtime.model.head import head_rows
from penstock.runtime.reading.layout import TensorLayout
from penstock.runtime.store.base import Extent, Store, UnitLayout
from penstock.runtime.store.decoder import module_name

Bind = Callable[[Mapping[str, nn.Parameter]], None]


@dataclass(frozen=True)
class Fixture:
    """A layout that stays in ``tier`` for the whole run.

    ``bind`` points the model at its parameters once it is filled; None for LM-head blocks, which the head asks for.
    """

    name: str
    layout: UnitLayout
    tier: Tier
    bind: Bind | None
    unit: Unit | None = None
    cast: Cast | DecodedUnit | None = None
    """Where it is computed with in another type or form than it is stored in. ``layout`` has the room for a cast."""

    def bound(self, tensors: Sequence[TensorLayout]) -> Sequence[TensorLayout]:
        """Its ``tensors`` after :meth:`settle`; before, they lie there as they are stored."""
        return tensors if self.cast is None else self.cast.as_bound(tensors)

    def settle(self, tensors: Sequence[TensorLayout], buffer: torch.Tensor) -> None:
        """It has arrived: make it what is computed with."""
        if self.cast is not None:
            self.cast.convert(tensors, buffer)


def rows_of(layout: UnitLayout, first: int, last: int) -> UnitLayout:
    """Rows [first, last) of a layout's single tensor, as a layout of its own with one tensor named ``weight``."""
    (tensor,) = layout.tensors
    (extent,) = layout.extents
    row = tensor.nbytes // tensor.shape[0]
    offset = extent.offset + tensor.offset - extent.dest + first * row
    nbytes = (last - first) * row
    dest = offset % ALIGN
    block = replace(tensor, name="weight", shape=(last - first, *tensor.shape[1:]), offset=dest, nbytes=nbytes)
    return UnitLayout(align_up(dest + nbytes), (block,), (Extent(extent.file, offset, nbytes, dest, owns_pages=True),), nbytes)


def host_fixtures(store: Store, model: PreTrainedModel) -> list[Fixture]:
    """Two tiers: everything outside the decoder blocks lies in DRAM, bound as it is."""
    fixtures = [_whole(model, name, layout, Tier.dram) for name, layout in store.others().items()]
    head = model.get_output_embeddings()
    embed = model.get_input_embeddings()
    if head.weight is embed.weight:
        table = module_name(model, embed) + ".weight"

        def both(params: Mapping[str, nn.Parameter]) -> None:
            embed._parameters["weight"] = head._parameters["weight"] = params[table]

        untied = [f for f in fixtures if f.name != module_name(model, head) + ".weight"]
        fixtures = [replace(f, bind=both) if f.name == table else f for f in untied]
    return fixtures


def device_fixtures(placement: Placement, store: Store, model: PreTrainedModel, layers: nn.ModuleList) -> list[Fixture]:
    """Three tiers: norms and resident units in VRAM, tables where the plan puts them, LM-head blocks in either. A rank may have no
    embedding."""
    others = dict(store.others())
    embed = module_name(model, model.get_input_embeddings()) + ".weight"
    head = module_name(model, model.get_output_embeddings()) + ".weight"
    table = others.pop(embed, None)
    head_table = others.pop(head, table)
    assert head_table is not None, "a head that is tied has its embedding's table"
    wanted = model.get_output_embeddings().weight.dtype
    fixtures = [_whole(model, name, layout, Tier.vram) for name, layout in others.items()]
    fixtures += [] if table is None else [_whole(model, embed, table, placement.weights.embedding)]
    for j, (rows, tier) in enumerate(zip(head_rows(placement.model.vocab, placement.weights.head_blocks), placement.head, strict=True)):
        fixtures.append(_cast(Fixture(f"{head}[{j}]", rows_of(head_table, *rows), tier, None, Unit("head", j)), wanted))
    for unit, tier in placement.units:
        if tier is Tier.vram and unit.kind != "head":
            decoded = DecodedUnit.of(layers, unit) if placement.form(unit) is WeightForm.decoded else None
            fixtures.append(Fixture(str(unit), store.unit(unit), tier, _to_block(layers, unit), unit, decoded))
    return fixtures


def _whole(model: PreTrainedModel, name: str, layout: UnitLayout, tier: Tier) -> Fixture:
    """A parameter that lies outside the units, cast where the model computes with another float type."""
    owner, _, leaf = name.rpartition(".")
    return _cast(Fixture(name, layout, tier, _to_model(model)), getattr(model.get_submodule(owner), leaf).dtype)


def _cast(fixture: Fixture, wanted: torch.dtype) -> Fixture:
    """``fixture``, of one tensor, as it is where the model computes with ``wanted``."""
    if wanted == fixture.layout.tensors[0].dtype:
        return fixture
    return replace(fixture, layout=Cast(wanted).roomy(fixture.layout), cast=Cast(wanted))


def _to_model(model: PreTrainedModel) -> Bind:
    return lambda params: bind(model, params)


def _to_block(layers: nn.ModuleList, unit: Unit) -> Bind:
    return lambda params: bind(layers[unit.layer], params)
