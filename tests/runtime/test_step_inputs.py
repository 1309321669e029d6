"""A pass's numbers reach the device as they were when they were put, however far behind it is."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.engine.passes.step_inputs import CopiedInputs, MappedInputs, step_numbers
from penstock.runtime.model.rows import Row, RowKind, Step
from tests.runtime.fakes import FakeDevice

CPU = torch.device("cpu")


def test_numbers_come_as_they_are() -> None:
    for inputs in (CopiedInputs(CPU), MappedInputs(FakeDevice(), CPU, most=4)):
        for numbers in ([5, -7, 1 << 40], [], [9] * 4, list(range(6))):
            there = inputs.put(numbers)
            assert there.tolist() == numbers and there.dtype == torch.long


def test_a_buffer_is_written_again_only_when_the_device_has_read_it() -> None:
    """The kernel that reads a buffer is followed by an event; with two buffers the third pass waits for the first one's."""
    device = FakeDevice()
    inputs = MappedInputs(device, CPU, most=4, buffers=2)
    inputs.put([1])
    inputs.put([2])
    assert device.done_on["compute"] == 0, "the host waited while a buffer was free"
    inputs.put([3])
    assert device.done_on["compute"] == 1
    inputs.put([4])
    assert device.done_on["compute"] == 2


def test_what_is_too_much_for_the_buffers_takes_none_of_them() -> None:
    device = FakeDevice()
    inputs = MappedInputs(device, CPU, most=2, buffers=1)
    assert inputs.put([1, 2, 3]).tolist() == [1, 2, 3]
    assert inputs.put([4]).tolist() == [4] and device.done_on["compute"] == 0


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(0, 1 << 20), st.integers(0, 80)), max_size=5))
def test_a_step_is_its_ids_and_positions_and_wanted_tokens(rows: list[tuple[int, int, int]]) -> None:
    """Short rows and long ones, which are counted in two ways."""
    made = [
        Row(n, tuple(range(7 * n, 7 * n + count)), start, (), RowKind.prompt, min(wanted, count))
        for n, (count, start, wanted) in enumerate(rows)
    ]
    firsts = [sum(len(row.tokens) for row in made[: number + 1]) for number in range(len(made))]
    wanted = chain.from_iterable(range(end - row.wanted, end) for row, end in zip(made, firsts, strict=True))
    ids = chain.from_iterable(row.tokens for row in made)
    positions = chain.from_iterable(range(row.start, row.start + len(row.tokens)) for row in made)
    numbers = step_numbers(Step(tuple(made)))
    assert numbers.tolist() == [*ids, *positions, *wanted]
    assert CopiedInputs(CPU).put(numbers).tolist() == numbers.tolist()
