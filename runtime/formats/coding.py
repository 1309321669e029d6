"""What a coded format can do with a matrix: the protocol that each format's own module fulfils."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

Parts = Mapping[str, torch.Tensor]
"""Leaf -> tensor, with the shapes and dtypes in which the checkpoint stores them; of routed experts those of one expert."""


class Coding(Protocol):
    """Arithmetic of one format. It keeps nothing between calls."""

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        """Write the matrix into ``out`` [rows, columns], contiguous, in the dtype to compute in, on the device of ``parts``: bit for bit
        what the format's reference gives."""

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor | None:
        """``x`` [tokens, columns] -> [tokens, rows] straight from the stored form. None where decoding and an ordinary product is the way:
        many rows, no kernel for this device. A fused product may differ from decode-then-multiply within 1 % of the largest output."""


@runtime_checkable
class CodingAround(Coding, Protocol):
    """A frozen dataclass that moves rows of what another coding decodes or multiplies."""

    coding: Coding


@runtime_checkable
class GroupedCoding(Coding, Protocol):
    """One that multiplies by several experts' matrices at once."""

    def grouped(self, parts: Parts, bias: torch.Tensor | None) -> Any:
        """One expert's matrix as :meth:`experts` takes it, which may be kept while its tensors stay where they are. None where it must be
        multiplied by itself."""

    def experts(self, x: torch.Tensor, matrices: Sequence[Any]) -> torch.Tensor | None:
        """``x`` [1 or experts, columns] -> [experts, rows]: a row for each of ``matrices``, or the same row for all, computed as by
        :meth:`Coding.linear`. None where there is no kernel for this device, or for where the tensors lie."""

    def tabled(self, x: torch.Tensor, matrix: Any, table: torch.Tensor) -> torch.Tensor | None:
        """The same by matrices that lie as ``matrix`` does, each as many times 256 bytes behind it as ``table`` says, int64 [experts] on
        the device: it is read when the product is computed, so that a recorded product meets other experts each time."""


@runtime_checkable
class JoinedCoding(Coding, Protocol):
    """One that multiplies a row by several matrices at once."""

    def joined(self, x: torch.Tensor, matrices: Sequence[Parts]) -> torch.Tensor | None:
        """``x`` [1, columns] -> [1, rows of all ``matrices``], computed as by :meth:`Coding.linear`. None where there is no kernel for this
        device, or for such matrices."""
