"""The sections of a packed store as its manifest lists them: what each may say, and where it may lie."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.checkpoint.safetensors_header import is_counts
from penstock.runtime.reading.layout import PARAMETER_ALIGN, Extent, TensorLayout, UnitLayout
from penstock.runtime.store.parameters import DTYPE_NAMES, DTYPES


class SectionFlaw(Exception):
    """What is wrong with a manifest, in words for one line."""


@dataclass(frozen=True)
class Section:
    """One run of the weights file: a unit (``attn.3``) or another parameter (its full name)."""

    name: str
    offset: int
    nbytes: int
    """Multiple of 4096, padding (zeros) included in the checksum."""
    checksum: str
    """xxh3_128 of the ``nbytes`` bytes, in hexadecimal."""
    tensors: tuple[TensorLayout, ...]

    def layout(self, weights: Path) -> UnitLayout:
        """The whole section as one direct read."""
        extent = Extent(weights, self.offset, self.nbytes, 0, owns_pages=True)
        return UnitLayout(self.nbytes, self.tensors, (extent,), sum(t.nbytes for t in self.tensors))


def section_to_json(section: Section) -> dict[str, Any]:
    return {
        "name": section.name,
        "offset": section.offset,
        "nbytes": section.nbytes,
        "xxh3_128": section.checksum,
        "parameters": [[t.name, DTYPE_NAMES[t.dtype], list(t.shape), t.offset, t.nbytes] for t in section.tensors],
    }


def sections_from_json(body: Any) -> tuple[Section, ...]:
    """The sections that a manifest's list says, each held against its own parameters. Raises SectionFlaw."""
    if not isinstance(body, list):
        raise SectionFlaw("its sections are no list")
    return tuple(_section(one) for one in body)


def check_places(sections: Iterable[Section]) -> None:
    """SectionFlaw where two sections overlap, or one lies on the superblock, or two have one name."""
    placed = sorted((s for s in sections if s.nbytes), key=lambda s: s.offset)
    if placed and placed[0].offset < ALIGN:
        raise SectionFlaw(f"section {placed[0].name} lies at {placed[0].offset}, on the superblock")
    for one, other in pairwise(placed):
        if other.offset < one.offset + one.nbytes:
            raise SectionFlaw(f"section {other.name} at {other.offset} overlaps section {one.name}")
    names = [s.name for s in sections]
    if len(set(names)) < len(names):
        raise SectionFlaw("two sections have one name")


def _section(body: Any) -> Section:
    if not isinstance(body, dict) or not isinstance(body.get("name"), str) or not isinstance(body.get("xxh3_128"), str):
        raise SectionFlaw("a section has no name and checksum")
    name, offset, nbytes, parameters = body["name"], body.get("offset"), body.get("nbytes"), body.get("parameters")
    if not isinstance(offset, int) or not isinstance(nbytes, int) or not is_counts([offset, nbytes]) or offset % ALIGN or nbytes % ALIGN:
        raise SectionFlaw(f"section {name[:60]}: offset and nbytes must be multiples of {ALIGN}, 0 or more")
    if not isinstance(parameters, list):
        raise SectionFlaw(f"section {name[:60]}: parameters are missing")
    tensors = tuple(_tensor(name[:60], one) for one in parameters)
    end = 0
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.offset < end or tensor.offset + tensor.nbytes > nbytes:
            raise SectionFlaw(f"section {name[:60]}: parameter {tensor.name[:60]} overlaps another, or lies past the end")
        end = tensor.offset + tensor.nbytes
    return Section(name, offset, nbytes, body["xxh3_128"], tensors)


def _tensor(section: str, body: Any) -> TensorLayout:
    if not isinstance(body, list) or len(body) != 5 or not isinstance(body[0], str) or not isinstance(body[1], str):
        raise SectionFlaw(f"section {section}: a parameter must be [name, dtype, shape, offset, nbytes]")
    name, dtype, shape, offset, nbytes = body
    if dtype not in DTYPES:
        raise SectionFlaw(f"section {section}: parameter {name[:60]} has dtype {dtype[:20]}")
    if not is_counts(shape) or not is_counts([offset, nbytes]) or offset % PARAMETER_ALIGN:
        raise SectionFlaw(f"section {section}: parameter {name[:60]} has no valid shape, offset and nbytes")
    if math.prod(shape) * DTYPES[dtype].itemsize != nbytes:
        raise SectionFlaw(f"section {section}: parameter {name[:60]} has {nbytes} bytes, not those of its shape and dtype")
    return TensorLayout(name, tuple(shape), DTYPES[dtype], offset, nbytes)
