"""Units that stay on a card decoded: stored bytes arrive in a place that has room for more, and are decoded where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from penstock.planner.common.measures import align_up
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.formats.stored_linear import DECODED, StoredLinear
from penstock.runtime.model.binding import views
from penstock.runtime.reading.layout import PARAMETER_ALIGN, TensorLayout
from penstock.runtime.store.decoder import unit_modules


class _Item(NamedTuple):
    """What becomes one tensor."""

    bound: TensorLayout
    main: TensorLayout
    """The leaf with most bytes; of a plain tensor itself."""
    linear: StoredLinear | None
    leaves: Mapping[str, TensorLayout]


@dataclass(frozen=True)
class DecodedUnit:
    """``linears`` are the layers of a unit whose matrices are coded, by their names in it.

    Stored tensors lie at the end of the place, decoded ones from its begin on, in the same order: what is decoded overwrites only what was
    read. Costs the scratch, and a copy of the smaller leaves meanwhile; a copy of all where a unit is stored in less handy an order.
    """

    linears: Mapping[str, StoredLinear]

    @classmethod
    def of(cls, layers: nn.ModuleList, unit: Unit) -> DecodedUnit:
        found = {}
        for child, module in unit_modules(layers, unit).items():
            for name, inner in module.named_modules(prefix=child):
                if isinstance(inner, StoredLinear):
                    found[name] = inner
        return cls(found)

    def as_bound(self, tensors: Sequence[TensorLayout]) -> tuple[TensorLayout, ...]:
        """``tensors`` once they are decoded."""
        return tuple(item.bound for item in self._items(tensors))

    def convert(self, tensors: Sequence[TensorLayout], buffer: torch.Tensor) -> None:
        """In ``buffer`` (uint8)."""
        items = list(self._items(tensors))
        later = [item.main.offset for item in items[1:]] + [buffer.numel()]
        handy = all(item.bound.offset + item.bound.nbytes <= least for item, least in zip(items, later, strict=True))
        stored = views(tensors, buffer if handy else buffer.clone())
        mains = {item.main.name for item in items}
        stored = {name: view if name in mains else view.clone() for name, view in stored.items()}
        for item, target in zip(items, views([item.bound for item in items], buffer).values(), strict=True):
            if item.linear is None:
                target.copy_(stored[item.main.name].clone())
            else:
                parts = {leaf: stored[laid.name] for leaf, laid in item.leaves.items()}
                target.copy_(item.linear.in_scratch(parts))

    def _items(self, tensors: Sequence[TensorLayout]) -> Iterator[_Item]:
        """In the order of their main leaves."""
        groups: dict[str, dict[str, TensorLayout]] = {}
        for tensor in tensors:
            owner, _, leaf = tensor.name.rpartition(".")
            linear = self.linears.get(owner)
            coded = linear is not None and leaf in linear.stored_parameters
            groups.setdefault(owner if coded else f"{tensor.name} alone", {})[leaf] = tensor
        end = 0
        for owner, leaves in sorted(groups.items(), key=lambda group: _main(group[1]).offset):
            main, linear = _main(leaves), self.linears.get(owner)
            bound = main
            if linear is not None:
                shape = (linear.out_features, linear.in_features)
                bound = TensorLayout(f"{owner}.{DECODED}", shape, linear.dtype, 0, shape[0] * shape[1] * linear.dtype.itemsize)
            yield _Item(replace(bound, offset=end), main, linear, leaves)
            end = align_up(end + bound.nbytes, PARAMETER_ALIGN)


def _main(leaves: Mapping[str, TensorLayout]) -> TensorLayout:
    return max(leaves.values(), key=lambda leaf: leaf.nbytes)
