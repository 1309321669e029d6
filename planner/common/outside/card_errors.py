"""What a CUDA card, its libraries and torch raise when it fails, in one line. Torch is not imported: it is known by its words.

CUDA's errors come as torch's AcceleratorError or OutOfMemoryError, as RuntimeErrors of cuBLAS, cuDNN, Triton and NCCL, and by number from
calls of the driver that go past torch.
"""

from __future__ import annotations

import re

from penstock.planner.common.errors import UserError, causes

_TYPES = ("AcceleratorError", "OutOfMemoryError")
_WORDS = (
    "CUDA error",
    "CUDA out of memory",
    "CUDA driver error",
    "Cuda failure",
    "Triton Error [CUDA]",
    "CUBLAS_STATUS_",
    "cuDNN error",
    "ncclUnhandledCudaError",
)
_SHORT = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
"""cuBLAS that finds no memory for its handle says that it is not initialized."""
_NUMBERED = re.compile(r"CUDA error(?: |: .* returned )2\b")
"""Of a call past torch: CUDA_ERROR_OUT_OF_MEMORY."""
_SAID = 160
"""Characters of another's words that one line has room for."""
FAILED_REMEDY = "run it again, and where that recurs see what nvidia-smi says of the card"


class CardFailed(UserError):
    """A card does no more what it did before. No user can mend that by other keys, and a process that is begun anew may have it again."""


def is_of_card(error: BaseException) -> bool:
    """Whether a card, its driver or a library on it says ``error``."""
    return isinstance(error, RuntimeError) and (type(error).__name__ in _TYPES or any(words in str(error) for words in _WORDS))


def is_out_of_vram(error: BaseException) -> bool:
    """Whether ``error`` is of VRAM that could not be had: by torch's allocator, for a context, a stream or a library's workspace."""
    text = str(error)
    return is_of_card(error) and (
        type(error).__name__ == "OutOfMemoryError" or any(words in text for words in _SHORT) or _NUMBERED.search(text) is not None
    )


def said_by_card(error: BaseException) -> str:
    """The words in which ``error`` says what happened, without its advice to programmers."""
    first = str(error).strip().partition("\n")[0]
    reason = re.search(r"Cuda failure.*", str(error))
    return (reason[0] if reason and "Cuda failure" not in first else first).rstrip(".")[:_SAID] or type(error).__name__


def card_trouble(error: BaseException | None) -> UserError | None:
    """The one line for an ``error`` that comes of a card: :class:`CardFailed` unless VRAM ran out; None for any other."""
    for one in causes(error):
        if is_out_of_vram(one):
            return UserError(f"VRAM ran out ({said_by_card(one)}); end the other process on the card, or solve again with less VRAM")
        if is_of_card(one):
            return CardFailed(f"the card failed ({said_by_card(one)}); {FAILED_REMEDY}")
    return None
