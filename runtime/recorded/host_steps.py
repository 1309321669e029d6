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
from penstock.runtime.beside.host_ffn import HostFfn
from penstock.runtime.beside.host_matrix import HostMatrix, host_matrix_of
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.beside.host_serve import FLAG_WORDS
from penstock.runtime.formats.stored_linear import StoredLinear
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.model.binding import WeightStream
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.recorded.heard_stream import HeardStream
from penstock.runtime.recorded.recorded_stream import RecordedStream

_GATED, _PLAIN = ("gate_proj", "up_proj", "down_proj"), ("fc1", "fc2")
_BF16, _INT32 = torch.bfloat16.itemsize, torch.int32.itemsize


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


def host_unit(unit: Unit, name: str, module: nn.Module, tensors: Mapping[str, torch.Tensor], activation: str) -> HostUnit:
    """``module``, which its layer calls ``name``; ``tensors`` of the layer, by name, in DRAM. RuntimeError where the CPU has no product
    with them, which the plan's rules exclude."""
    projections = _GATED if hasattr(module, _GATED[0]) else _PLAIN
    matrices = [_matrix(module.get_submodule(p), f"{name}.{p}.", tensors) for p in projections]
    biases = [tensors.get(f"{name}.{p}.bias") for p in projections]
    gate, gate_bias = (matrices[0], biases[0]) if len(matrices) == 3 else (None, None)
    return HostUnit(unit, module, HostFfn(gate, matrices[-2], matrices[-1], activation, (gate_bias, biases[-2], biases[-1])))


def _matrix(module: nn.Module, prefix: str, tensors: Mapping[str, torch.Tensor]) -> HostMatrix:
    leaves = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix) and n != f"{prefix}bias"}
    form = module.form.name if isinstance(module, StoredLinear) else _PLAIN_NAMES[leaves["weight"].dtype]
    made = host_matrix_of(form, leaves)
    if made is None:
        raise RuntimeError(f"{prefix}: the CPU has no product with {form}")
    return made


_PLAIN_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class HostSteps:
    """Answers a recorded step's ``units``, each when the card asks for it, by the threads of ``pool``.

    The card's kernels write the unit's rows into page-locked memory and read the CPU's from there, so that nothing queues behind copies of
    weights. Two words a unit, one each way, order both sides. Costs 2 * rows * hidden * 2 bytes of page-locked DRAM.

    Where other ranks' threads have the same cores (``in_turn``), the pool sleeps between two units. The card says by a word more when a
    unit is near: when its layer's attention begins.
    """

    def __init__(self, pool: HostPool, units: Sequence[HostUnit], rows: int, device: CopyDevice, ledger: Ledger, in_turn: bool = False):
        hidden = units[0].ffn.inputs
        self._units, self._rows, self._ledger = units, rows, ledger
        words = len(units) * FLAG_WORDS
        sizes = (rows * hidden * _BF16, rows * units[0].ffn.outputs * _BF16, *[words * _INT32] * (3 if in_turn else 2))
        locked = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        self._to, self._from = (device.alias(one).view(torch.bfloat16).view(rows, -1) for one in locked[:2])
        self._ask, self._done = (one.view(torch.int32) for one in locked[2:4])
        self._near = locked[4].view(torch.int32) if in_turn else None
        self._numbers = {unit.unit.layer: number for number, unit in enumerate(units)}
        x, y = (one.view(torch.bfloat16).view(rows, -1) for one in locked[:2])
        self._serve = pool.serve([unit.ffn for unit in units], rows, hidden, self._ask, self._done, x, y, self._near)
        torch.mul(torch.mul(self._from, 1), 1, out=self._to)  # loads what is recorded later

    @contextmanager
    def computing(self, flags: Flags, stream: RecordedStream) -> Iterator[WeightStream]:
        """Inside, the units' modules have the CPU compute; what it gives is to feed the pass in place of ``stream``."""
        try:
            for number, unit in enumerate(self._units):
                unit.module.forward = partial(self._hand_over, number, flags, stream)
            yield stream if self._near is None else HeardStream(stream, partial(self._entered, flags, self._near))
        finally:
            for unit in self._units:
                vars(unit.module).pop("forward", None)

    def _hand_over(self, number: int, flags: Flags, stream: RecordedStream, hidden: torch.Tensor) -> torch.Tensor:
        at = number * FLAG_WORDS * _INT32
        torch.mul(hidden.reshape(self._rows, -1), 1, out=self._to)  # a kernel: a copy would wait for the link
        asked = stream.point()
        flags.write_word(self._ask.data_ptr() + at, 1)
        flags.wait_word(self._done.data_ptr() + at, 1)
        flags.write_word(self._done.data_ptr() + at, 0)
        stream.handed_over(self._units[number].unit, asked, stream.point())
        return torch.mul(self._from, 1).view_as(hidden)

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
