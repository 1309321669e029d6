"""Units that the CPU computes in a step that is launched kernel by kernel: the interpreter hands each over and waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from penstock.planner.common.timeline.spans import CPU
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.recorded.agreement import disagreement
from penstock.runtime.recorded.host_steps import HostUnit


class LaunchedUnits:
    """Has the threads of ``pool`` compute ``units`` of at most ``rows`` rows, in passes that hand them over; else their modules do.

    Kernels write a unit's rows into page-locked memory and read the CPU's from there, so that nothing queues behind copies of weights. The
    pools of other ranks have the same cores. So threads sleep until a layer's attention begins on the card, and again once its unit is
    computed.

    In the first pass that the card computes, a prompt's, the CPU computes the first unit for as many rows, too. Where rounding of
    ``layers`` does not explain the difference nothing is handed over, and ``tell`` gets the line that says so. Costs 2 * rows * hidden * 2
    bytes of page-locked DRAM.
    """

    def __init__(
        self,
        pool: HostPool,
        units: Sequence[HostUnit],
        rows: int,
        device: CopyDevice,
        locked: bool,
        ledger: Ledger,
        layers: int,
        tell: Callable[[str], None] = lambda line: None,
    ):
        self._pool, self._units, self._device, self._ledger = pool, units, device, ledger
        self._rounded_layers, self._tell = layers, tell
        self._unproven: HostUnit | None = units[0]
        self.refused: str | None = None
        """Why nothing is handed over; None where units are."""
        self._layers = frozenset(unit.unit.layer for unit in units)
        dtype = units[0].ffn.dtype
        widths = units[0].ffn.inputs, units[0].ffn.outputs
        held = [torch.zeros(rows * width * dtype.itemsize, dtype=torch.uint8, pin_memory=locked) for width in widths]
        self._x, self._y = (one.view(dtype).view(rows, -1) for one in held)
        self._to, self._from = (device.alias(one).view(dtype).view(rows, -1) for one in held)
        self._begun: Event | None = None
        """Where the card begins with the layer in progress: all that its attention waits for is there."""
        self._live = self._real = False
        """Whether the pass in progress hands its units over, and whether its weights are there."""
        self._before = [vars(unit.module).get("forward") for unit in units]
        for unit in units:
            unit.module.forward = partial(self._computed, unit, unit.module.forward)

    def begin_pass(self, handed: bool, real: bool = True) -> None:
        """A pass comes that hands its units over, or has the card compute them; in a rehearsal it is not ``real``."""
        self._live, self._real = handed, real

    def entered(self, unit: Unit) -> None:
        """The kernels of ``unit`` come next."""
        if unit.kind == "attn" and unit.layer in self._layers:
            self._begun = self._device.compute_event()

    def _computed(self, unit: HostUnit, inner: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        if not self._live:
            made = inner(hidden)
            if unit is self._unproven and self._real:
                self._hold_to_the_card(unit, hidden, made)
            return made
        rows = hidden.reshape(-1, hidden.shape[-1])
        count = len(rows)
        torch.mul(rows, 1, out=self._to[:count])  # a kernel: a copy would wait for the link
        ready, begun = self._device.compute_event(), self._begun
        if begun is not None:
            self._device.host_waits(begun)
            self._pool.near()
        self._device.host_waits(ready)
        since = time.perf_counter()
        self._pool.ffn(unit.ffn, self._x[:count], self._y[:count])
        self._ledger.add(CPU, str(unit.unit), since, time.perf_counter(), unit.ffn.bytes)
        self._pool.near(0)
        self._begun = None
        return torch.mul(self._from[:count], 1).view(*hidden.shape[:-1], -1)

    def _hold_to_the_card(self, unit: HostUnit, hidden: torch.Tensor, made: torch.Tensor) -> None:
        """The card has ``made`` this of ``hidden``. Blocks until it is there."""
        self._unproven = None
        count = min(len(self._x), hidden.numel() // hidden.shape[-1])
        self._to[:count].copy_(hidden.reshape(-1, hidden.shape[-1])[:count])
        want = made.reshape(-1, made.shape[-1])[:count].cpu()
        self._device.host_waits(self._device.compute_event())
        self._pool.ffn(unit.ffn, self._x[:count], self._y[:count])
        self.refused = disagreement(self._y[:count], want, self._rounded_layers)
        if self.refused is not None:
            self._tell(self.refused)

    def close(self) -> None:
        """Modules compute for themselves again. A second call does nothing."""
        for unit, before in zip(self._units, self._before, strict=True):
            vars(unit.module).pop("forward", None)
            if before is not None:
                unit.module.forward = before
