"""K and V of all sequences, in pages: page p is slot p of every layer's buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from penstock.runtime.kv.batch.page_pool import PagePool
from penstock.runtime.kv.batch.token_shape import TokenShape
from penstock.runtime.memory.vram import give_back
from penstock.runtime.model.rows import Step


class KvPlace(Protocol):
    """One layer's buffer, wherever it lies."""

    def enter(self, shape: TokenShape) -> torch.Tensor:
        """The buffer, uint8 [slots * page_tokens * shape.nbytes], for kernels issued until :meth:`leave`. Of each row of the pass it holds
        the tokens before its ``start``."""

    def written(self) -> None:
        """What writes the pass's new tokens to the buffer was issued."""

    def leave(self) -> None:
        """Everything that reads the buffer was issued."""

    def forget(self, sequence: int) -> None:
        """``sequence`` has ended: its tokens need not be brought any more."""


class _Block:
    """One allocation for the buffers of all layers that are alike, [layers, bytes]; taken when the first one asks."""

    def __init__(self, layers: int):
        self._layers = layers
        self._held: torch.Tensor | None = None
        self._given = 0

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """The next layer's buffer; one of another size takes memory of its own."""
        if self._held is None:
            self._held = torch.empty(self._layers, nbytes, dtype=torch.uint8, device=device)
        if self._held.shape[1] != nbytes or self._given == self._layers:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._given += 1
        return self._held[self._given - 1]


class ResidentPlace:
    """A layer whose buffer stays on the compute device; taken when the layer is first computed."""

    def __init__(self, tokens: int, device: torch.device, block: _Block):
        self._tokens, self._device, self._block = tokens, device, block
        self.buffer: torch.Tensor | None = None

    def enter(self, shape: TokenShape) -> torch.Tensor:
        if self.buffer is None:
            self.buffer = self._block.take(self._tokens * shape.nbytes, self._device)
        return self.buffer

    def written(self) -> None:
        """It stays where it is."""

    def leave(self) -> None:
        """It stays where it is."""

    def forget(self, sequence: int) -> None:
        """Its pages are whoever's takes them."""


class KvPool:
    """``slots`` pages of ``page_tokens`` tokens in each layer of ``kinds``, which says which layers are alike.

    Costs slots * page_tokens * bytes of a token on ``device`` from the first pass on, for each layer that is not in ``outside``. Layers in
    ``outside`` have memory of their own.
    """

    def __init__(
        self, slots: int, page_tokens: int, kinds: Mapping[int, str], device: torch.device, outside: Mapping[int, KvPlace] | None = None
    ):
        self.pages = PagePool(slots, page_tokens)
        self.shapes: dict[int, TokenShape] = {}
        """Of the layers that were computed so far."""
        self._outside = dict(outside or {})
        resident = [layer for layer in kinds if layer not in self._outside]
        blocks = {kind: _Block(sum(kinds[layer] == kind for layer in resident)) for kind in set(kinds.values())}
        self._resident = {layer: ResidentPlace(slots * page_tokens, device, blocks[kinds[layer]]) for layer in resident}
        self._step: Step | None = None

    @property
    def page_tokens(self) -> int:
        return self.pages.page_tokens

    @property
    def step(self) -> Step:
        """What the pass in progress computes."""
        if self._step is None:
            raise RuntimeError("no pass is in progress")
        return self._step

    @property
    def layers(self) -> list[int]:
        """All that have a place."""
        return sorted([*self._resident, *self._outside])

    def close(self) -> None:
        """Give the layers' buffers back, whoever still holds a view of them."""
        for place in self._resident.values():
            if place.buffer is not None:
                give_back(place.buffer)

    def begin_pass(self, step: Step) -> None:
        """``step`` is computed from now on."""
        self._step = step

    def end_pass(self) -> None:
        """The model has returned."""
        self._step = None

    def forget(self, sequence: int) -> None:
        """``sequence`` has ended."""
        for place in self._outside.values():
            place.forget(sequence)

    def place(self, layer: int) -> KvPlace:
        return self._outside.get(layer) or self._resident[layer]

    def put_outside(self, places: Mapping[int, KvPlace]) -> None:
        """Between passes: layers have these places from now on."""
        self._outside |= places

    def buffers(self) -> dict[int, torch.Tensor]:
        """Of the layers that stay on the compute device, uint8, once each was computed. Layers that are alike lie at equal distances in one
        allocation."""
        taken = {layer: place.buffer for layer, place in self._resident.items() if place.buffer is not None}
        missing = [layer for layer in self._resident if layer not in taken]
        if missing:
            raise RuntimeError(f"KV of layer {missing[0]} was not taken yet")
        return taken
