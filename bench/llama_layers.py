"""Which tensors of a GGUF file llama.cpp keeps in VRAM, and as many of them as a budget holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from bench.gguf_synth import GgufModel

BLOCK = re.compile(r"blk\.(\d+)\.")
EXPERTS = "_exps."
TABLE = "token_embd.weight"
"""Never in VRAM; a token reads one row of it."""
ALL = 99
"""-ngl of a model whose experts alone stay in DRAM."""


@dataclass(frozen=True)
class Split:
    """``-ngl`` and ``-ncmoe``: in VRAM are the LM head and the last ``ngl`` - 1 layers, without the experts of the first ``ncmoe``."""

    ngl: int
    ncmoe: int = 0

    @property
    def flags(self) -> Sequence[str]:
        return ("-ngl", str(self.ngl), *(("-ncmoe", str(self.ncmoe)) if self.ncmoe else ()))

    def __str__(self) -> str:
        return " ".join(self.flags)


@dataclass(frozen=True)
class LlamaLayers:
    """``kv_bytes``: of one layer, which lies where the layer does."""

    model: GgufModel
    kv_bytes: int = 0

    @property
    def splits(self) -> list[Split]:
        """All there are, the one with the least in VRAM first: of layers, or of layers whose experts go with them."""
        layers = self.model.layers
        if self.model.experts:
            return [Split(ALL, layers - n) for n in range(layers + 1)]
        return [Split(n) for n in range(layers + 2)]

    def vram_bytes(self, split: Split) -> int:
        """Of weights and KV; scratch and context are not known before a run."""
        first = self._first(split)
        weights = sum(nbytes for layer, nbytes in enumerate(self._plain) if layer >= first)
        experts = sum(nbytes for layer, nbytes in enumerate(self._experts) if layer >= max(first, split.ncmoe))
        end = self._end if split.ngl > 0 else 0
        return weights + experts + end + self.kv_bytes * (self.model.layers - first)

    def read_bytes(self, split: Split) -> int:
        """What the CPU reads for a token."""
        first, share = self._first(split), self.model.top_k / self.model.experts if self.model.experts else 0.0
        weights = sum(nbytes for layer, nbytes in enumerate(self._plain) if layer < first)
        experts = sum(nbytes for layer, nbytes in enumerate(self._experts) if layer < max(first, split.ncmoe))
        return weights + round(experts * share) + (self._end if split.ngl == 0 else 0)

    def dram_bytes(self, split: Split) -> int:
        """Of weights, the embedding's table among them."""
        return self.model.nbytes - self.vram_bytes(split) + self.kv_bytes * (self.model.layers - self._first(split))

    def fit(self, budget_bytes: int, beside_bytes: int) -> Split:
        """The most that fits into the budget with so much scratch and context beside it; the least there is where nothing does."""
        fitting = [split for split in self.splits if self.vram_bytes(split) + beside_bytes <= budget_bytes]
        return fitting[-1] if fitting else self.splits[0]

    def less(self, split: Split) -> Split | None:
        """One layer less in VRAM; None where there is none to give."""
        at = self.splits.index(split)
        return self.splits[at - 1] if at else None

    def _first(self, split: Split) -> int:
        """The first layer in VRAM."""
        return min(self.model.layers, max(0, self.model.layers + 1 - split.ngl))

    @cached_property
    def _plain(self) -> list[int]:
        return self._by_layer(False)

    @cached_property
    def _experts(self) -> list[int]:
        return self._by_layer(True)

    def _by_layer(self, experts: bool) -> list[int]:
        found = [0] * self.model.layers
        for one in self.model.tensors:
            if (block := BLOCK.match(one.name)) and (EXPERTS in one.name) == experts:
                found[int(block[1])] += one.nbytes
        return found

    @cached_property
    def _end(self) -> int:
        return sum(one.nbytes for one in self.model.tensors if not BLOCK.match(one.name) and one.name != TABLE)
