"""A pass's numbers reach the device as they were when they were put, however far behind it is."""

from __future__ import annotations

import torch

from penstock.runtime.engine.passes.step_inputs import CopiedInputs, MappedInputs
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
