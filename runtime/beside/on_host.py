"""Coded matrices that the CPU multiplies as they are stored, where nothing else computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.planner.contract.given.formats import HOST_PRODUCT_ROWS, QUANTISED, Dtype
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.asked.run_schema import CpuProduct
from penstock.runtime.beside.coded_parts import PARTS_OF
from penstock.runtime.beside.host_ffn import NUMBERS, host_linear
from penstock.runtime.beside.host_library import products_unbuilt
from penstock.runtime.beside.host_matrix import host_matrix_of
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.formats.coding import Coding, CodingAround, Parts
from penstock.runtime.formats.stored_experts import JOINT
from penstock.runtime.formats.stored_linear import StoredLinear


@dataclass(frozen=True)
class OnHost:
    """``coding`` of ``form``, whose matrices ``pool`` multiplies by few rows of BF16 or F16. Sums are F32, in another order than
    torch's, of weights that have the bits of decoded ones, or are not rounded at all (docs/formats.md)."""

    coding: Coding
    form: str
    pool: HostPool

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        self.coding.decode(parts, out)

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor | None:
        rows = x.reshape(-1, x.shape[-1])
        if x.dtype not in NUMBERS or len(rows) > HOST_PRODUCT_ROWS:
            return None
        matrix = host_matrix_of(self.form, parts)
        if matrix is None or not matrix.takes(x.dtype):
            return None
        out = x.new_empty(len(rows), matrix.rows)
        self.pool.ffn(host_linear(matrix, bias, x.dtype), rows.contiguous(), out)
        return out


class StoredOnHost:
    """Has ``pool`` multiply by the coded linear layers and routed experts of a model whose format is one of ``formats``."""

    def __init__(self, pool: HostPool, formats: frozenset[str], attends: bool = False):
        """``attends``: whether the pool attends, too, where no matrix is coded."""
        self._pool, self._formats = pool, formats
        self.products: dict[str, str] = {"attention": "own"} if attends else {}
        """Format -> ``stored`` or ``decode``, of the model that was converted; ``attention`` -> ``own`` where nothing is coded."""

    @property
    def summing(self) -> HostPool | None:
        """The pool, where a model that was converted has sums of its own and not torch's; None where all of them are torch's."""
        return self._pool if {"stored", "own"} & {*self.products.values()} else None

    def convert(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, StoredLinear):
                module.coding = self._on_host(module.coding, module.form.name)
            experts: Any = getattr(module, "stored_experts", {})
            if experts:
                held: Any = module
                formats = {name.partition(JOINT)[0]: each.format for name, each in held.stored_parameters.items()}
                held.stored_experts = {
                    name: tuple(replace(matrix, coding=self._on_host(matrix.coding, formats[matrix.name])) for matrix in matrices)
                    for name, matrices in experts.items()
                }

    def _on_host(self, coding: Coding, form: str) -> Coding:
        stored = form in self._formats
        self.products[form] = "stored" if stored else "decode"
        if not stored:
            return coding
        if isinstance(coding, CodingAround):
            around: Any = coding
            inside: Coding = replace(around, coding=OnHost(around.coding, form, self._pool))
            return inside
        return OnHost(coding, form, self._pool)


def multiplied_as_stored(asked: str | None) -> frozenset[str]:
    """The formats that a run multiplies as they are stored: ``stored`` says all that the CPU has a product for, ``decode`` none. None: all
    but the lossless form, whose sums have the bits of torch's BF16 products only if torch makes them."""
    if asked == "decode":
        return frozenset()
    return frozenset(PARTS_OF) if asked == "stored" else frozenset(name for name, form in QUANTISED.items() if form.host_rows)


def open_on_host(plan: Plan, asked: CpuProduct | None, stack: ExitStack) -> StoredOnHost | None:
    """What multiplies by coded matrices as they are stored, and attends, with threads until ``stack`` is closed; None where torch does all.
    UserError where ``asked`` wants what no compiler made."""
    formats = multiplied_as_stored(asked)
    attends = asked is CpuProduct.stored and not plan.model.coded and plan.model.compute_dtype is Dtype.bfloat16
    if not formats or not (plan.model.coded or attends) or (asked is None and products_unbuilt() is not None):
        return None
    pool = stack.enter_context(HostPool(plan.hardware.cpu_threads or torch.get_num_threads(), joined=True))
    return StoredOnHost(pool, formats, attends)


@contextmanager
def multiplying(threads: int) -> Iterator[None]:
    """Torch computes with so many threads meanwhile; 0 leaves the number to torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
