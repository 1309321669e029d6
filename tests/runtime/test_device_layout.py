"""A unit in VRAM: few copies, tensors where kernels can read them."""

import pytest
import torch

from penstock.planner.common.measures import align_up
from penstock.planner.contract.prices.sizes import unit_vram_bytes
from penstock.runtime.moving.device_layout import device_layout
from penstock.runtime.reading.layout import TensorLayout, UnitLayout

SCALES, WEIGHTS = 10240, 8 << 20


def unit(*placed):
    """Of (offset, bytes)."""
    tensors = tuple(TensorLayout(f"t{i}", (nbytes,), torch.uint8, at, nbytes) for i, (at, nbytes) in enumerate(placed))
    return UnitLayout(align_up(max(at + n for at, n in placed)), tensors, (), sum(n for _, n in placed))


class TestRunsOfAFile:
    def test_pages_between_scales_and_weights_come_along(self):
        made = device_layout(unit((112, SCALES), (align_up(112 + SCALES) + 2048, WEIGHTS)))
        assert len(made.segments) == 1
        assert made.nbytes <= unit_vram_bytes(SCALES + WEIGHTS)

    @pytest.mark.parametrize("hole", [3 * 4096, 2048 + 8], ids=["long", "crooked"])
    def test_two_copies_where_much_lies_between_or_a_tensor_would_start_askew(self, hole):
        made = device_layout(unit((0, SCALES), (SCALES + hole, WEIGHTS)))
        assert len(made.segments) == 2
        assert made.segments[1].dst % 256 == 0

    def test_a_small_unit_takes_no_more_than_its_bytes(self):
        made = device_layout(unit((0, 1024), (4096, 4096)))
        assert [s.nbytes for s in made.segments] == [1024, 4096]

    def test_all_that_comes_along_stays_within_what_the_plan_counts(self):
        at, placed = 0, []
        for _ in range(6):
            placed.append((at, WEIGHTS))
            at += WEIGHTS + 4096
        made = device_layout(unit(*placed))
        assert 1 < len(made.segments) < 6
        assert made.nbytes <= unit_vram_bytes(6 * WEIGHTS)
