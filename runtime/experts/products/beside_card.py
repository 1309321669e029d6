"""The CPU's share of a layer's missed experts: computed from their slots in DRAM while the link brings the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.ffn_activation import ACTIVATIONS
from penstock.planner.contract.experts.expert_cache import Routing
from penstock.planner.contract.experts.host_split import HostSplit
from penstock.runtime.beside.host_ffn import HostFfn
from penstock.runtime.beside.host_matrix import HostMatrix, host_matrix_of
from penstock.runtime.beside.host_pool import HostPool, Ticket, UnitRows
from penstock.runtime.experts.products.expert_products import clamps
from penstock.runtime.experts.products.expert_views import PlacedTensors
from penstock.runtime.formats.coding import Coding
from penstock.runtime.formats.codings import CODINGS
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.store.expert_modules import ExpertsModule

FLAG_BYTES = 64


class Made(NamedTuple):
    """An expert that was computed elsewhere: its output for each of its tokens, in their order, [rows, hidden]."""

    expert: int
    rows: torch.Tensor
    at: int
    """The first of these rows among all results of the visit."""


class Asked(NamedTuple):
    """An expert that the CPU began with, and the rows of its results."""

    expert: int
    rows: slice
    wait: Callable[[], None]
    """Returns when its slot is read."""


UnitOf = Callable[[int, int, int, torch.Tensor], HostFfn]
"""Of (layer, expert, slot, the slot's buffer)."""


FORMATS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
REMEDY = "solve again with moe.host=copied"


class ExpertUnits:
    """Of one layer's module: what it computes with an expert, as a unit of the CPU.

    Its ``gate_up_proj`` [experts, 2 * ffn, hidden] holds the gate's rows first, or is coded as a gate and an up of their own. gpt-oss's is
    coded, with gate and up in turns, and biases.
    """

    def __init__(self, module: ExpertsModule, dtype: torch.dtype = torch.bfloat16):
        """``dtype``: what it computes in. UserError for experts that compute otherwise."""
        self._dtype = dtype
        self._stored = getattr(module, "stored_experts", {})
        self._name, self._gated = "gate_up_proj" if module.has_gate else "up_proj", module.has_gate
        self._clamp = clamps(module)
        self._activation = "silu" if self._clamp else _activation(module)
        parts = len(self._stored.get(self._name, ()))
        if self._clamp is None and (module.has_bias or (module.is_transposed and not parts) or (self._gated and parts == 1)):
            raise UserError(f"{type(module).__name__}: the CPU has no product with experts that are stored so; {REMEDY}")

    def of(self, expert: int, tensors: PlacedTensors) -> HostFfn:
        """``expert``, which lies where ``tensors`` are, in DRAM. It is kept beside them: a unit holds addresses."""
        number, unit = tensors.known.get("unit", (None, None))
        if number != expert or unit is None:
            unit = self._unit(tensors)
            tensors.known["unit"] = expert, unit
        return unit

    def _unit(self, tensors: Mapping[str, torch.Tensor]) -> HostFfn:
        first, (down,) = self._matrices(self._name, tensors), self._matrices("down_proj", tensors)
        if self._clamp is not None:
            biases = None, tensors[f"{self._name}_bias"], tensors["down_proj_bias"]
            return HostFfn(None, first[0], down, biases=biases, clamp=self._clamp, dtype=self._dtype)
        gate, up = first if self._gated else (None, first[0])
        return HostFfn(gate, up, down, self._activation, dtype=self._dtype)

    def _matrices(self, name: str, tensors: Mapping[str, torch.Tensor]) -> list[HostMatrix]:
        if name in self._stored:
            made = [host_matrix_of(_format(matrix.coding), matrix.parts(tensors)) for matrix in self._stored[name]]
        else:
            weight = tensors[name]
            parts = weight.chunk(2) if self._gated and name == self._name else (weight,)
            made = [host_matrix_of(FORMATS[part.dtype], {"weight": part}) for part in parts]
        found = [matrix for matrix in made if matrix is not None]
        if len(found) < len(made):
            raise UserError(f"{name}: the CPU has no product with experts that are stored so; {REMEDY}")
        return found


def _format(coding: Coding) -> str:
    """The name of the format that ``coding`` decodes."""
    return next(name for name, known in CODINGS.items() if known is coding)


def _activation(module: ExpertsModule) -> str:
    """As :class:`HostFfn` names it."""
    known = {type(ACT2FN[name]): said for name, said in ACTIVATIONS.items()}
    found = known.get(type(module.act_fn))
    gate: object = type(module)._apply_gate if module.has_gate else _default_apply_gate
    if found is None or gate is not _default_apply_gate:
        raise UserError(f"{type(module).__name__}: the CPU does not compute this activation; {REMEDY}")
    return found


class BesideCard:
    """Hidden rows and results pass through page-locked memory that kernels write and read in place: a small copy would wait behind those of
    weights. The card waits for results by a flag, so the host goes on to issue what comes next.

    Takes (rows + rows * top_k) * hidden * 2 bytes of page-locked DRAM.
    """

    def __init__(
        self, split: HostSplit, copy_bytes: int, pool: HostPool, unit_of: UnitOf, shape: tuple[int, int, int], copier: CopyDevice,
        device: torch.device, dtype: torch.dtype = torch.bfloat16, spins: bool = True,
    ):  # fmt: skip
        """``copy_bytes``: of an expert. ``shape``: rows of a step at most, experts of a token, hidden. ``dtype``: of rows and
        results. ``spins``: whether threads wait awake for a router's choice."""
        self._dtype, self._spins = dtype, spins
        self._split, self._copy_bytes, self._pool, self._unit_of, self._copier = split, copy_bytes, pool, unit_of, copier
        rows, top_k, hidden = shape
        self._rows = rows
        self._x, self._x_there = self._mapped(rows, hidden, device)
        self._y, self._y_there = self._mapped(rows * top_k, hidden, device)
        self._alone = [(UnitRows.of(self._x[:1], out), there) for out, there in zip(self._y.split(1), self._y_there.split(1), strict=True)]
        """Of one token: what each expert that the CPU takes computes, and its result as kernels read it."""
        self._x_alone = self._x_there[:1]
        self._flag = torch.zeros(FLAG_BYTES // 4, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._flag_at = self._flag.data_ptr()
        self._visits = 0
        self._tickets: list[Ticket] = []
        """Of the visit in progress: they keep what the threads read."""
        self.computed = 0
        """Experts so far."""
        self._used: tuple[int, float] | None = None
        """Once it is closed."""

    def prepare(self, places: Mapping[tuple[int, int], tuple[int, torch.Tensor]]) -> None:
        """Make the units of experts, by layer and number, that have come to their ``places`` in DRAM. Some 100 us each, before the CPU
        begins with one and before any copy is queued: a step would wait for it."""
        for (layer, expert), place in places.items():
            self._unit_of(layer, expert, *place).in_c()

    def take(self, hidden: torch.Tensor) -> None:
        """``hidden`` [rows, hidden] goes into a layer's router, whose choice the host waits for. Nothing for more rows than a step has."""
        rows = hidden.shape[0]
        if rows <= self._rows:
            torch.add(hidden, 0, out=self._x_alone if rows == 1 else self._x_there[:rows])
            if self._spins:
                self._pool.near()

    def begin(self, layer: int, routing: Routing, places: Mapping[int, tuple[int, torch.Tensor]], queued_bytes: int) -> Sequence[Asked]:
        """Have the CPU's share of a step's missed experts computed. ``places`` are their slots in DRAM, ``queued_bytes`` what the link has
        to copy first."""
        if routing.prompt or len(routing.chosen) > self._rows:
            return ()
        experts = [*places]
        one = len(routing.chosen) == 1
        tokens = [] if one else [np.flatnonzero((routing.chosen == expert).any(1)).tolist() for expert in experts]
        queue_s = queued_bytes / self._copy_bytes * self._split.copy_s
        taken = self._split.on_host((1,) * len(experts) if one else [len(rows) for rows in tokens], queue_s)
        if not taken:
            return ()
        self._visits += 1
        self.computed += len(taken)
        self._tickets, asked, at = [], [], 0
        for number in taken:
            expert, end = experts[number], at + (1 if one else len(tokens[number]))
            rows = self._alone[at][0] if one else UnitRows.of(self._x[tokens[number]], self._y[at:end])
            flag = self._flag_at if number == taken[-1] else None
            ticket = self._pool.start(self._unit_of(layer, expert, *places[expert]), rows, flag, self._visits)
            self._tickets.append(ticket)
            asked.append(Asked(expert, slice(at, end), partial(self._pool.wait, ticket)))
            at = end
        return asked

    def made(self, asked: Sequence[Asked]) -> list[Made]:
        """What :meth:`begin` began, for kernels issued from now on, which wait for it."""
        self._copier.compute_waits_for(self._flag, self._visits)
        found = []
        for expert, rows, _ in asked:
            at = rows.start
            found.append(Made(expert, self._alone[at][1] if rows.stop == at + 1 else self._y_there[rows], at))
        return found

    @property
    def results(self) -> torch.Tensor:
        """[rows * top_k, hidden]: where :class:`Made` has its rows, as kernels read it."""
        return self._y_there

    def used(self) -> tuple[int, float]:
        """Bytes of weights that the CPU read so far, and the seconds in which it did."""
        if self._used is not None:
            return self._used
        told = self._pool.told()
        return told.bytes, told.busy_s

    def close(self) -> None:
        """End the threads, after what they began. Safe to call twice."""
        self._used = self.used()
        self._pool.close()

    def _mapped(self, rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.zeros(rows, width, dtype=self._dtype, pin_memory=device.type == "cuda")
        return host, self._copier.alias(host.view(torch.uint8).view(-1)).view(self._dtype).view(rows, width)
