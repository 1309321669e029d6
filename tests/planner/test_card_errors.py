"""What a card, its libraries and torch raise is told apart by its words: VRAM that ran out, a card that failed, anything else."""

from __future__ import annotations

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.card_errors import CardFailed, card_trouble, is_of_card, is_out_of_vram


class AcceleratorError(RuntimeError):
    """Torch's, by its name."""


class OutOfMemoryError(RuntimeError):
    """Torch's, by its name."""


ADVICE = "\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda.\nFor debugging pass CUDA_LAUNCH_BLOCKING=1\n"
NCCL = "NCCL error in: a.cpp:77, unhandled cuda error, NCCL version 2.27\nncclUnhandledCudaError: Call failed.\nLast error:\n"
SHORT = [
    OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has"),
    AcceleratorError("CUDA error: out of memory" + ADVICE),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("cuMemAlloc_v2: CUDA error 2"),
    RuntimeError("CUDA error: cuStreamCreateWithPriority returned 2"),
    RuntimeError(NCCL + "Cuda failure 2 'out of memory'"),
]
FAILED = [
    AcceleratorError("CUDA error: unspecified launch failure" + ADVICE),
    AcceleratorError("CUDA error: uncorrectable ECC error encountered" + ADVICE),
    AcceleratorError("a word of a release to come"),
    RuntimeError("CUDA error: cuStreamWaitValue32 returned 214"),
    RuntimeError("cuIpcOpenMemHandle_v2: CUDA error 201"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    RuntimeError(NCCL + "Cuda failure 719 'unspecified launch failure'"),
]
OTHERS = [RuntimeError("shapes differ"), ValueError("CUDA error: out of memory"), RuntimeError("NCCL error: remote process exited")]


@pytest.mark.parametrize("error", SHORT, ids=str)
def test_vram_that_cannot_be_had_is_told_apart_whoever_wanted_it(error: Exception) -> None:
    line = card_trouble(error)
    assert is_out_of_vram(error) and type(line) is UserError and str(line).startswith("VRAM ran out (") and "https:" not in str(line)


@pytest.mark.parametrize("error", FAILED, ids=str)
def test_a_card_that_fails_is_one_line_without_advice_to_programmers(error: Exception) -> None:
    line = card_trouble(error)
    assert is_of_card(error) and not is_out_of_vram(error)
    assert isinstance(line, CardFailed) and str(line).startswith("the card failed (") and "CUDA_LAUNCH" not in str(line)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_what_no_card_says_stays_what_it_is(error: Exception) -> None:
    assert not is_of_card(error) and card_trouble(error) is None


def test_the_words_of_nccl_that_say_why_are_those_that_are_told() -> None:
    assert "(Cuda failure 719 'unspecified launch failure')" in str(card_trouble(FAILED[-1]))


def test_what_stumbled_over_a_failed_card_is_told_as_the_card() -> None:
    """A cleanup that finds nothing as it was raises something of its own."""
    try:
        try:
            raise FAILED[0]
        finally:
            {}["gone"]
    except KeyError as error:
        line = card_trouble(error)
    assert "unspecified launch failure" in str(line)
