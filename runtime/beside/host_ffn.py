"""Units that the CPU computes: an FFN, gated or plain, and one linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from penstock.runtime.beside.host_library import CMatrix, CUnit
from penstock.runtime.beside.host_matrix import HostMatrix, made_matrix

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
"""In the order of ``enum activation`` of unit.h."""
NUMBERS: Mapping[torch.dtype, int] = MappingProxyType({torch.bfloat16: 0, torch.float16: 1})
"""What a unit computes with, by ``enum number`` of products.h."""
_PRODUCT, _PLAIN, _GATED, _READ, _PAIRED = range(5)


@dataclass(frozen=True)
class HostFfn:
    """``down(act(gate x) * up x)``; without ``gate`` ``down(act(up x))``; without ``up``, too, the linear layer ``down x``. With
    ``clamp`` gpt-oss's expert: ``up``'s rows are gate and up in turns, and ``down`` takes ``(up + 1) * gate * sigmoid(alpha * gate)``.

    Inputs and outputs are of ``dtype``. What torch's layers of it round is rounded: each layer's output, the activation's, the product's.
    Sums are F32, in another order than torch's.
    """

    gate: HostMatrix | None
    up: HostMatrix | None
    down: HostMatrix
    activation: str = "silu"
    """One of ``ACTIVATIONS``."""
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None)
    """Of gate, up and down; of ``dtype``, else rounded to it."""
    clamp: tuple[float, float] | None = None
    """(alpha, limit) of gpt-oss's expert: gate is at most the limit, up within it on both sides. ``activation`` then says nothing."""
    dtype: torch.dtype = torch.bfloat16
    """One of ``NUMBERS``."""
    _kept: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError where shapes do not fit each other, or there is no product with inputs of ``dtype``."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"no activation {self.activation}; there are {', '.join(ACTIVATIONS)}")
        for matrix in (self.gate, self.up, self.down):
            if self.dtype not in NUMBERS or (matrix is not None and not matrix.takes(self.dtype)):
                raise ValueError(f"no product of {self.dtype} with {self.down.kind if matrix is None else matrix.kind}")
        if self.gate is not None and (self.up is None or (self.gate.rows, self.gate.columns) != (self.up.rows, self.up.columns)):
            raise ValueError("gate and up have other shapes")
        given = 0 if self.up is None else self.up.rows // (1 if self.clamp is None else 2)
        if self.up is not None and self.down.columns != given:
            raise ValueError(f"down takes {self.down.columns} columns, up gives {given}")

    @property
    def inputs(self) -> int:
        """Columns of an input row."""
        return self.down.columns if self.up is None else self.up.columns

    @property
    def outputs(self) -> int:
        """Columns of an output row."""
        return self.down.rows

    @property
    def bytes(self) -> int:
        """Of weights that one pass reads."""
        return sum(matrix.bytes for matrix in (self.gate, self.up, self.down) if matrix is not None)

    def in_c(self) -> CUnit:
        """As the library takes it, made once; it lives as long as this does."""
        if "unit" not in self._kept:
            biases = [None if bias is None else bias.to(self.dtype).contiguous() for bias in self.biases]
            form = _PRODUCT if self.up is None else _PLAIN if self.gate is None else _GATED
            form = form if self.clamp is None else _PAIRED
            none = CMatrix()
            self._kept["biases"] = biases
            self._kept["unit"] = CUnit(
                form,
                ACTIVATIONS.index(self.activation),
                NUMBERS[self.dtype],
                none if self.gate is None else self.gate.in_c(),
                none if self.up is None else self.up.in_c(),
                self.down.in_c(),
                (type(CUnit().bias))(*(None if bias is None else bias.data_ptr() for bias in biases)),
                self.bytes,
                *(self.clamp or (0.0, 0.0)),
            )
        unit = self._kept["unit"]
        assert isinstance(unit, CUnit)
        return unit


def host_linear(matrix: HostMatrix, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> HostFfn:
    """One linear layer of ``dtype`` as a unit."""
    return HostFfn(None, None, matrix, biases=(None, None, bias), dtype=dtype)


def host_read(memory: torch.Tensor) -> CUnit:
    """Reading ``memory``, contiguous on the CPU, and nothing else."""
    read = made_matrix("F32", 0, 0, 0, memory)
    return CUnit(_READ, 0, 0, CMatrix(), CMatrix(), read.in_c(), (type(CUnit().bias))(), memory.nbytes)
