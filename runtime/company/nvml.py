"""What NVML says of this machine's cards: it needs neither torch nor a context, which takes VRAM itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.runtime.company.cards_here import shown_as

ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
Answer = TypeVar("Answer")


def ask_nvml(ask: Callable[[Any], Answer], nvml: Any = None) -> Answer | None:
    """What ``ask`` finds with the module ``pynvml``, imported unless ``nvml`` is given; None where NVML is not there or refuses."""
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return None
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return ask(nvml)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def card_of_uuid(nvml: Any, uuid: str) -> Any:
    """The card that torch or CUDA_VISIBLE_DEVICES calls ``uuid``."""
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def free_vram_of(card: int, nvml: Any = None) -> int | None:
    """Free bytes of number ``card`` of those that CUDA shows this process. None where NVML does not say, where it may number the cards
    otherwise, as unlike ones are, and for a part of a card that has only a number."""
    name = shown_as(card)

    def ask(nvml: Any) -> int | None:
        if name.startswith(("GPU-", "MIG-")):
            return int(nvml.nvmlDeviceGetMemoryInfo(card_of_uuid(nvml, name)).free)
        cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        alike = os.environ.get(ORDER) == BY_BUS or len({nvml.nvmlDeviceGetName(each) for each in cards}) == 1
        if not alike or not name.isdigit() or int(name) >= len(cards) or _is_divided(nvml, cards[int(name)]):
            return None
        return int(nvml.nvmlDeviceGetMemoryInfo(cards[int(name)]).free)

    return ask_nvml(ask, nvml)


def _is_divided(nvml: Any, card: Any) -> bool:
    """Whether CUDA shows parts of ``card`` in its place."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(card)[0])
    except nvml.NVMLError:
        return False  # it cannot be divided
