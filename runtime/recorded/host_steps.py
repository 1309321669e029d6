"""The CPU's part of a recorded step: units that it computes where they lie in DRAM, while the link brings others to the card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.beside.host_ffn import HostFfn, host_linear
from penstock.runtime.beside.host_matrix import HostMatrix, host_matrix_of
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.beside.host_serve import FLAG_WORDS
from penstock.runtime.formats.stored_linear import StoredLinear
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.model.binding import WeightStream
from penstock.runtime.model.head import BlockedHead
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.recorded.heard_stream import HeardStream
from penstock.runtime.recorded.recorded_stream import RecordedStream

_GATED, _PLAIN = ("gate_proj", "up_proj", "down_proj"), ("fc1", "fc2")
_INT32 = torch.int32.itemsize


class Flags(Protocol):
    """A recorded stream's words in page-locked memory, by their address."""

    def write_word(self, address: int, value: int) -> None:
        """Behind what was recorded before, all of which others see by then."""

    def wait_word(self, address: int, value: int) -> None:
        """What is recorded next begins once the word has ``value``."""


@dataclass(frozen=True)
class HostUnit:
    """A unit of the CPU's: the module that the card computes it with in other passes, and its weights where they lie."""

    unit: Unit
    module: nn.Module
    ffn: HostFfn

    @property
    def is_of_head(self) -> bool:
        """Whether it is a block of the LM head."""
        return self.unit.kind == "head"


def host_unit(
    unit: Unit,
    name: str,
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    activation: str,
    dtype: torch.dtype = torch.bfloat16,
) -> HostUnit:
    """``module``, which its layer calls ``name`` and which computes with ``dtype``; ``tensors`` of the layer, by name, in
    DRAM. RuntimeError where the CPU has no product with them, which the plan's rules exclude."""
    projections = _GATED if hasattr(module, _GATED[0]) else _PLAIN
    matrices = [_matrix(module.get_submodule(p), f"{name}.{p}.", tensors) for p in projections]
    biases = [tensors.get(f"{name}.{p}.bias") for p in projections]
    gate, gate_bias = (matrices[0], biases[0]) if len(matrices) == 3 else (None, None)
    ffn = HostFfn(gate, matrices[-2], matrices[-1], activation, (gate_bias, biases[-2], biases[-1]), dtype=dtype)
    return HostUnit(unit, module, ffn)


def host_block(unit: Unit, head: BlockedHead, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> HostUnit:
    """A block of ``head``, whose rows ``tensors`` hold in DRAM as ``weight``. The head adds its bias itself. RuntimeError as above."""
    return HostUnit(unit, head, host_linear(_made(head.form, str(unit), tensors), dtype=dtype))


def _matrix(module: nn.Module, prefix: str, tensors: Mapping[str, torch.Tensor]) -> HostMatrix:
    leaves = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix) and n != f"{prefix}bias"}
    return _made(module.form.name if isinstance(module, StoredLinear) else None, prefix, leaves)


def _made(form: str | None, name: str, leaves: Mapping[str, torch.Tensor]) -> HostMatrix:
    form = form or _PLAIN_NAMES[leaves["weight"].dtype]
    made = host_matrix_of(form, leaves)
    if made is None:
        raise RuntimeError(f"{name}: the CPU has no product with {form}")
    return made


_PLAIN_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class HostSteps:
    """Answers a recorded step's ``units``, each when the card asks for it, by the threads of ``pool``.

    The card's kernels write the unit's rows into page-locked memory and read the CPU's from there, so that nothing queues behind copies of
    weights. Two words a unit, one each way, order both sides. Blocks of the LM head, the last of ``units``, are asked for at once, before
    the card begins with its own. Costs 2 * rows * hidden * 2 bytes of page-locked DRAM, and rows * 2 for each row of those blocks.

    Where other ranks' threads have the same cores (``in_turn``), the pool sleeps between two units. The card says by a word more when a
    unit is near: when its layer's attention begins.
    """

    def __init__(self, pool: HostPool, units: Sequence[HostUnit], rows: int, device: CopyDevice, ledger: Ledger, in_turn: bool = False):
        hidden, dtype = units[0].ffn.inputs, units[0].ffn.dtype
        self._units, self._rows, self._ledger = units, rows, ledger
        words, places, end = len(units) * FLAG_WORDS, list[int](), rows * hidden
        for unit in units:
            places.append(end if unit.is_of_head else 0)
            end += rows * unit.ffn.outputs if unit.is_of_head else 0
        sizes = (rows * hidden * dtype.itemsize, end * dtype.itemsize, *[words * _INT32] * (3 if in_turn else 2))
        locked = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        self._to = device.alias(locked[0]).view(dtype).view(rows, -1)
        made = device.alias(locked[1]).view(dtype)
        ends = (at + rows * unit.ffn.outputs for at, unit in zip(places, units, strict=True))
        self._from = [made[at:past].view(rows, -1) for at, past in zip(places, ends, strict=True)]
        self._ask, self._done = (one.view(torch.int32) for one in locked[2:4])
        self._near = locked[4].view(torch.int32) if in_turn else None
        self._numbers = {unit.unit.layer: number for number, unit in enumerate(units) if not unit.is_of_head}
        x, y = (one.view(dtype) for one in locked[:2])
        ffns = [unit.ffn for unit in units]
        self._serve = pool.serve(ffns, rows, hidden, self._ask, self._done, x, y, self._near, None if in_turn else places)
        torch.mul(torch.mul(self._to, 1), 1, out=self._to)  # loads what is recorded later
        for unit, rows_made in zip(units, self._from, strict=True):
            if isinstance(unit.module, BlockedHead):
                torch.mul(rows_made, 1, out=unit.module.part(self._to.new_empty(rows, unit.module.outputs), unit.unit.layer))

    @contextmanager
    def computing(self, flags: Flags, stream: RecordedStream) -> Iterator[WeightStream]:
        """Inside, the units' modules have the CPU compute; what it gives is to feed the pass in place of ``stream``."""
        try:
            for number, unit in enumerate(self._units):
                if isinstance(unit.module, BlockedHead):
                    unit.module.beside = self._blocks_beside(flags, stream)
                else:
                    unit.module.forward = partial(self._hand_over, number, flags, stream)
            yield stream if self._near is None else HeardStream(stream, partial(self._entered, flags, self._near))
        finally:
            for unit in self._units:
                vars(unit.module).pop("beside" if unit.is_of_head else "forward", None)

    def _hand_over(self, number: int, flags: Flags, stream: RecordedStream, hidden: torch.Tensor) -> torch.Tensor:
        self.begin(hidden)
        asked = stream.point()
        self.ask(number, flags)
        self.answered(number, flags, stream, asked)
        return torch.mul(self._from[number], 1).view_as(hidden)

    def _blocks_beside(self, flags: Flags, stream: RecordedStream) -> HandedBlocks:
        return HandedBlocks(self, {unit.unit.layer: n for n, unit in enumerate(self._units) if unit.is_of_head}, flags, stream)

    def begin(self, hidden: torch.Tensor) -> None:
        """The units that are asked for next are computed with rows [..., hidden]."""
        torch.mul(hidden.reshape(self._rows, -1), 1, out=self._to)  # a kernel: a copy would wait for the link

    def ask(self, number: int, flags: Flags) -> None:
        """Have the CPU begin with unit ``number`` when it is through with those before."""
        flags.write_word(self._ask.data_ptr() + number * FLAG_WORDS * _INT32, 1)

    def answered(self, number: int, flags: Flags, stream: RecordedStream, asked: Event) -> torch.Tensor:
        """What is recorded next begins behind the CPU's product with unit ``number`` -> its rows. From ``asked`` on nothing else is left to
        compute."""
        at = self._done.data_ptr() + number * FLAG_WORDS * _INT32
        flags.wait_word(at, 1)
        flags.write_word(at, 0)
        stream.handed_over(self._units[number].unit, asked, stream.point())
        return self._from[number]

    def _entered(self, flags: Flags, near: torch.Tensor, unit: Unit) -> None:
        """The kernels of ``unit`` come next, once its weights and the hidden states are there."""
        if unit.kind == "attn" and unit.layer in self._numbers:
            flags.write_word(near.data_ptr() + self._numbers[unit.layer] * FLAG_WORDS * _INT32, 1)

    def begin_step(self) -> None:
        """A recorded step is about to be launched."""
        self._serve.begin_step()

    def settle(self) -> None:
        """Book the last step, whose results are there."""
        for unit, (begun_s, ended_s) in zip(self._units, self._serve.times(), strict=True):
            self._ledger.add("cpu", str(unit.unit), begun_s, ended_s, unit.ffn.bytes)

    def close(self) -> None:
        """The threads answer no more; after the last step."""
        self._serve.close()


@dataclass(frozen=True)
class HandedBlocks:
    """The LM head's blocks of ``steps``, in a step that is being recorded: ``BlocksBeside``. ``blocks``: the number of each among the CPU's
    units."""

    steps: HostSteps
    blocks: Mapping[int, int]
    flags: Flags
    stream: RecordedStream

    def begin(self, hidden: torch.Tensor) -> None:
        self.steps.begin(hidden)
        for number in self.blocks.values():
            self.steps.ask(number, self.flags)

    def give(self, block: int, out: torch.Tensor) -> None:
        made = self.steps.answered(self.blocks[block], self.flags, self.stream, self.stream.point())
        torch.mul(made, 1, out=out.view(made.shape))
