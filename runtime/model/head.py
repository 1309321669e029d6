"""The LM head in row blocks, of which some are streamed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.formats.stored_linear import StoredLinear
from penstock.runtime.model.binding import Binder


def head_rows(vocab: int, blocks: int) -> list[tuple[int, int]]:
    """Row ranges of ``blocks`` equal blocks of an LM head, the last one smaller when they do not divide."""
    size = -(-vocab // blocks)
    return [(start, min(start + size, vocab)) for start in range(0, vocab, size)]


@dataclass(frozen=True)
class HeadInBlocks:
    """Puts a :class:`BlockedHead` in place of a model's LM head."""

    vocab: int
    blocks: int

    def convert(self, model: PreTrainedModel) -> None:
        model.set_output_embeddings(BlockedHead(head_rows(self.vocab, self.blocks), model.get_output_embeddings()))


def _by_stored(linear: StoredLinear) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A product with rows of the one leaf in which ``linear`` is stored."""
    return lambda hidden, weight: linear.product(hidden, {"weight": weight}, len(weight))


class BlocksBeside(Protocol):
    """Who computes ``blocks`` of an LM head meanwhile, by number."""

    @property
    def blocks(self) -> Collection[int]:
        """In the order in which they are given."""

    def begin(self, hidden: torch.Tensor) -> None:
        """With rows [..., hidden]."""

    def give(self, block: int, out: torch.Tensor) -> None:
        """Put the logits of ``block`` into ``out`` [..., rows of the block]."""


class BlockedHead(nn.Module):
    """An LM head whose row blocks come one after the other: ``resident`` blocks lie in VRAM, the rest are streamed, but for those that
    somebody else computes ``beside``.

    It declares the whole ``weight``, which stays on the meta device. Input [..., hidden], output [..., vocab]; costs one block's logits
    beside the output.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    beside: BlocksBeside | None = None

    def __init__(self, rows: Sequence[tuple[int, int]], replaced: nn.Module):
        super().__init__()
        self._rows = rows
        self.register_parameter("weight", replaced.get_parameter("weight"))
        self.register_parameter("bias", getattr(replaced, "bias", None))
        if isinstance(replaced, StoredLinear):
            self.stored_parameters = replaced.stored_parameters
        self.form = replaced.form.name if isinstance(replaced, StoredLinear) else None
        """In which format it is stored, where that is none of torch's types."""
        self._multiply = _by_stored(replaced) if isinstance(replaced, StoredLinear) else F.linear

    def feed(self, resident: Mapping[int, torch.Tensor], binder: Binder) -> None:
        """Compute with ``resident`` blocks by number, and with those of the ``binder``'s stream for the others."""
        self._resident, self._binder = resident, binder

    @property
    def outputs(self) -> int:
        """Logits of a row."""
        return self._rows[-1][1]

    def part(self, logits: torch.Tensor, block: int) -> torch.Tensor:
        """Those of ``block`` in ``logits`` [..., outputs]."""
        first, last = self._rows[block]
        return logits[..., first:last]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out, beside = hidden.new_empty(*hidden.shape[:-1], self.outputs), self.beside
        theirs = () if beside is None else beside.blocks
        if beside is not None:
            beside.begin(hidden)
        for j in range(len(self._rows)):
            if j in theirs:
                continue
            block, unit = self._resident.get(j), Unit("head", j)
            weight = self._binder.stream.enter(unit)["weight"] if block is None else block
            self.part(out, j)[...] = self._multiply(hidden, weight)
            if block is None:
                self._binder.stream.leave(unit)
        if beside is not None:
            for j in theirs:
                beside.give(j, self.part(out, j))
        return out if self.bias is None else out + self.bias
