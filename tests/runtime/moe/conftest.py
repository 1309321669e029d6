"""The file of experts that tests of tiers read."""

from __future__ import annotations

import pytest
import torch

from penstock.planner.common.measures import ALIGN
from penstock.runtime.reading.layout import Extent, TensorLayout, UnitLayout
from tests.runtime.moe.tiers import (
    COUNT,
    ELEMENTS,
    LAYERS,
    value,
)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], UnitLayout]:
    """Every expert at some odd place of one file, its second tensor before its first."""
    path = tmp_path_factory.mktemp("experts") / "weights"
    data, found = bytearray(bytes(77)), {}
    for layer in LAYERS:
        for expert in range(COUNT):
            extents, tensors, dest = [], [], 0
            for t in (1, 0):
                piece = torch.full((ELEMENTS,), value(layer, expert, t)).numpy().tobytes()
                extents.append(Extent(path, len(data), len(piece), dest))
                tensors.append(TensorLayout(f"t{t}", (ELEMENTS,), torch.float32, dest, len(piece)))
                data += piece + bytes(13)
                dest += len(piece)
            found[layer, expert] = UnitLayout(-(-dest // ALIGN) * ALIGN, tuple(tensors), tuple(extents), dest)
    path.write_bytes(data)
    return found
