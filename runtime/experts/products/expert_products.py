"""Products with an expert's matrices: as they lie there, or coded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from penstock.runtime.experts.products.expert_views import PlacedTensors
from penstock.runtime.formats.coding import GroupedCoding
from penstock.runtime.formats.kernels.on_card import plain_kernels
from penstock.runtime.formats.scratch import Scratch
from penstock.runtime.formats.stored_experts import ExpertMatrix
from penstock.runtime.store.expert_modules import ExpertsModule

Parameters = Mapping[str, torch.Tensor]
"""Of one expert, without the leading dimension."""


class Product(Protocol):
    """One of a module's parameters, as ``gate_up_proj``, and its bias where the module has one."""

    columns: int
    """Of the input."""
    dtype: torch.dtype
    """Computed in."""

    def one(self, rows: torch.Tensor, expert: Parameters) -> torch.Tensor:
        """[rows, columns] -> [rows, outputs]."""

    def each(self, rows: torch.Tensor, experts: Sequence[Parameters]) -> torch.Tensor:
        """[1 or experts, columns] -> [experts, outputs]: a row for each expert, or the same row for all."""

    def tabled(self, rows: torch.Tensor, expert: Parameters, table: torch.Tensor) -> torch.Tensor | None:
        """The same with experts that lie as ``expert`` does, each as many times 256 bytes behind it as ``table`` says, int64 [experts] on
        the device, when the product is computed. None where no kernel does so."""


class PlainProduct:
    """A matrix as the model computes with it. Takes no memory beside the result."""

    def __init__(self, module: ExpertsModule, name: str):
        self._transposed, self._name, self._bias = module.is_transposed, name, f"{name}_bias" if module.has_bias else ""
        whole = module.get_parameter(name)
        self.columns, self.dtype = whole.shape[1 if self._transposed else 2], whole.dtype

    def one(self, rows: torch.Tensor, expert: Parameters) -> torch.Tensor:
        product = F.linear(rows, expert[self._name].T if self._transposed else expert[self._name])
        return product.add_(expert[self._bias]) if self._bias else product

    def each(self, rows: torch.Tensor, experts: Sequence[Parameters]) -> torch.Tensor:
        return one_by_one(self, rows, experts)

    def tabled(self, rows: torch.Tensor, expert: Parameters, table: torch.Tensor) -> torch.Tensor | None:
        kernels = plain_kernels(rows.device)
        bias = expert[self._bias] if self._bias else None
        return None if kernels is None else kernels.tabled(rows, expert[self._name], bias, table, self._transposed)


class CodedProduct:
    """Coded matrices that follow each other along the output. Few rows are multiplied by the stored form where the coding knows how, on a
    card those of several experts by one launch; else they are decoded into ``scratch``, which is all the memory that it takes."""

    def __init__(self, module: ExpertsModule, name: str, matrices: Sequence[ExpertMatrix], scratch: Scratch, dtype: torch.dtype):
        self.columns, self.dtype = matrices[0].columns, dtype
        self._matrices, self._scratch = matrices, scratch
        self._name, self._bias = name, f"{name}_bias" if module.has_bias else ""
        self._rows = sum(matrix.rows for matrix in matrices)
        self._codings = tuple(matrix.coding for matrix in matrices if isinstance(matrix.coding, GroupedCoding))
        self._grouped = len(self._codings) == len(matrices)

    def one(self, rows: torch.Tensor, expert: Parameters) -> torch.Tensor:
        fused = self._fused(rows, expert)
        if fused is not None:
            return fused
        weight, first = self._scratch.of(self._rows, self.columns, self.dtype, rows.device), 0
        for matrix in self._matrices:
            matrix.coding.decode(matrix.parts(expert), weight[first : first + matrix.rows])
            first += matrix.rows
        return self._biased(F.linear(rows, weight), expert)

    def each(self, rows: torch.Tensor, experts: Sequence[Parameters]) -> torch.Tensor:
        if not (self._grouped and rows.is_cuda):
            return one_by_one(self, rows, experts)
        made = []
        for coding, taken in zip(self._codings, zip(*map(self._taken, experts), strict=True), strict=True):
            product = None if any(one is None for one in taken) else coding.experts(rows, taken)
            if product is None:
                return one_by_one(self, rows, experts)
            made.append(product)
        if len(made) == 1:
            return made[0]
        joined = torch.cat(made, dim=-1)
        return joined.add_(torch.stack([expert[self._bias] for expert in experts])) if self._bias else joined

    def tabled(self, rows: torch.Tensor, expert: Parameters, table: torch.Tensor) -> torch.Tensor | None:
        if not (self._grouped and rows.is_cuda) or (self._bias and len(self._matrices) > 1):
            return None
        made = []
        for coding, matrix in zip(self._codings, self._grouped_matrices(expert), strict=True):
            product = None if matrix is None else coding.tabled(rows, matrix, table)
            if product is None:
                return None
            made.append(product)
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)

    def _taken(self, expert: Parameters) -> Sequence[Any]:
        """The matrices of ``expert`` as kernels take them, kept beside tensors that stay where they are."""
        if not isinstance(expert, PlacedTensors):
            return self._grouped_matrices(expert)
        codings, taken = expert.known.get(self._name, (None, ()))
        if codings != self._codings:
            taken = self._grouped_matrices(expert)
            expert.known[self._name] = self._codings, taken
        return taken

    def _grouped_matrices(self, expert: Parameters) -> Sequence[Any]:
        bias = expert[self._bias] if self._bias and len(self._matrices) == 1 else None
        return [coding.grouped(matrix.parts(expert), bias) for matrix, coding in zip(self._matrices, self._codings, strict=True)]

    def _fused(self, rows: torch.Tensor, expert: Parameters) -> torch.Tensor | None:
        made = []
        for matrix in self._matrices:
            few = not rows.is_cuda or len(rows) <= matrix.product_rows
            product = matrix.coding.linear(rows, matrix.parts(expert), None) if few else None
            if product is None:
                return None
            made.append(product)
        return self._biased(made[0] if len(made) == 1 else torch.cat(made, dim=-1), expert)

    def _biased(self, product: torch.Tensor, expert: Parameters) -> torch.Tensor:
        return product.add_(expert[self._bias]) if self._bias else product


def product_of(module: ExpertsModule, name: str) -> Product:
    """With the parameter ``name`` of ``module``."""
    coded = getattr(module, "stored_experts", {}).get(name)
    if coded is None:
        return PlainProduct(module, name)
    known: Any = module
    return CodedProduct(module, name, coded, known.scratch, known.stored_dtype)


def clamps(module: ExpertsModule) -> tuple[float, float] | None:
    """gpt-oss's (alpha, limit) where ``module`` is its experts, coded: a fused product rounds less often than the model, and so may its
    gate."""
    known: Any = module
    coded = type(module).__name__ == "GptOssExperts" and hasattr(module, "stored_experts")
    return (float(known.alpha), float(known.limit)) if coded else None


def one_by_one(product: Product, rows: torch.Tensor, experts: Sequence[Parameters]) -> torch.Tensor:
    """What :meth:`Product.each` says."""
    each = [rows] * len(experts) if len(rows) == 1 else rows.split(1)
    made = [product.one(row, expert) for row, expert in zip(each, experts, strict=True)]
    return made[0] if len(made) == 1 else torch.cat(made)


def in_turn(product: Product, rows: torch.Tensor, heights: Sequence[int], experts: Sequence[Parameters]) -> torch.Tensor:
    """[rows, columns] -> [rows, outputs], so many of the rows by each of ``experts``. Of several experts the result lies there twice for a
    moment."""
    if len(experts) == 1:
        return product.one(rows, experts[0])
    return torch.cat([product.one(own, expert) for own, expert in zip(rows.split([*heights]), experts, strict=True)])
