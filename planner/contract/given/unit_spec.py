"""A unit of a model's weights: its bytes, its elements, and the format that relates them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.planner.contract.given.formats import Format, plain_format


class UnitKind(StrEnum):
    """What a unit of weights is for."""

    attn = "attn"
    """Parameters under ``self_attn`` of one layer, its inner norms included."""
    ffn = "ffn"
    """Parameters under ``mlp`` of one layer but for routed experts: of an MoE layer the router and the experts that every token visits."""
    expert = "expert"
    """One routed expert of one layer."""
    norm = "norm"
    """Everything that is always resident: layer norms, the final norm, other small tensors."""
    embed = "embed"
    """The embedding table."""
    head = "head"
    """The LM head. A model whose head is tied to the embedding table has none."""


PER_LAYER = (UnitKind.attn, UnitKind.ffn, UnitKind.expert)
"""Kinds that belong to a decoder layer; of the others a model has one unit."""


@dataclass(frozen=True)
class UnitSpec:
    """``count`` units of one kind, layer and size. Bytes and elements are of one of them."""

    kind: UnitKind
    layer: int | None
    """None for ``norm``, ``embed`` and ``head``."""
    stored_bytes: int
    """In the checkpoint. Links carry a unit and tiers hold it as stored, so these are its sent and its resident bytes, too."""
    elements: int
    """Parameters that a product multiplies by: a token costs 2 FLOPs for each."""
    format: Format
    """Of most of its bytes; a norm or a bias inside may have another."""
    count: int = 1
    """Routed experts of the layer; 1 for every other kind."""

    @property
    def is_coded(self) -> bool:
        """Whether its matrices are decoded before, or while, something is multiplied by them."""
        return self.format.needs_scratch

    @property
    def decoded_bytes(self) -> int:
        """Of it with every matrix decoded; ``stored_bytes`` where there is none to decode."""
        return self.elements * self.format.plain.nbytes if self.is_coded else self.stored_bytes

    @property
    def decoded(self) -> UnitSpec:
        """The same unit so."""
        return replace(self, stored_bytes=self.decoded_bytes, format=plain_format(self.format.plain)) if self.is_coded else self
