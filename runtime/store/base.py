"""What the engine asks of a store, and how one is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.reading.layout import Extent, TensorLayout, UnitLayout
from penstock.runtime.reading.store_errors import StoreError
from penstock.runtime.store.manifest import MANIFEST
from penstock.runtime.store.scales import Scale

__all__ = ["Extent", "Store", "StoreError", "TensorLayout", "UnitLayout", "open_store"]


class Store(Protocol):
    """Weights on the SSD. Opening one reads names and sizes only; bytes are read through a ``ReadPool``."""

    @property
    def directory(self) -> Path:
        """Holds config.json, tokenizer files and generation_config.json."""

    @property
    def digest(self) -> str:
        """Identity of the weights; a packed store has its checkpoint's."""

    @property
    def scales(self) -> Sequence[Scale]:
        """What a run checks: scales of the linear layers before it loads anything, those of experts and of GGUF's blocks as they come. None
        of a packed store, whose scales were checked when it was packed."""

    def unit(self, unit: Unit) -> UnitLayout:
        """The layout of an ``attn`` or ``ffn`` unit. KeyError for another."""

    def others(self) -> Mapping[str, UnitLayout]:
        """Full module name -> a layout of that tensor alone, for every parameter and persistent buffer that is in no unit. These are norms,
        the embedding, and the LM head unless it is tied."""


def open_store(path: Path, model: torch.nn.Module) -> Store:
    """The store at ``path``: a packed directory where there is a manifest, else a Hugging Face checkpoint read in place.

    ``model``, usually on the meta device, says which parameters there are and their shapes and dtypes. UserError, in one
    line, when the store is damaged or is not this model's.
    """
    from penstock.runtime.store.inplace import InPlaceStore
    from penstock.runtime.store.packed import PackedStore

    if (path / MANIFEST).exists():
        return PackedStore.open(path, model)
    return InPlaceStore.open(path, model)
