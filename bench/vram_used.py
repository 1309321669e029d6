"""The most VRAM that others took of the first card while a block ran, as its driver says."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType

from penstock.planner.common.errors import UserError

LIBRARY = "libnvidia-ml.so.1"
"""Part of every driver."""
PERIOD_S = 0.05


class _Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Card:
    """The first card's driver. UserError where it does not answer."""

    def __init__(self) -> None:
        try:
            self._nvml = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise UserError(f"{LIBRARY}: cannot be loaded ({error}), so VRAM cannot be measured; install the card's driver") from None
        self._handle = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(0), ctypes.byref(self._handle))

    def used_bytes(self) -> int:
        found = _Memory()
        self._ask("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(found))
        return int(found.used)

    def _ask(self, name: str, *arguments: object) -> None:
        if status := getattr(self._nvml, name)(*arguments):
            raise UserError(f"{LIBRARY}: {name} answers {status}, so VRAM cannot be measured; look at nvidia-smi")


class VramUsed:
    """``most_bytes`` beyond what was taken when the ``with`` block began, or beyond ``first``; 0 without a ``card``."""

    def __init__(self, card: Card | None, first: int | None = None):
        self._card, self._given = card, first
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._first = self._most = 0

    @property
    def most_bytes(self) -> int:
        return self._most - self._first

    def __enter__(self) -> VramUsed:
        if self._card is not None:
            self._most = self._card.used_bytes()
            self._first = self._most if self._given is None else self._given
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._card is not None:
            self._over.set()
            self._thread.join()

    def _sample(self) -> None:
        assert self._card is not None
        while not self._over.wait(PERIOD_S):
            self._most = max(self._most, self._card.used_bytes())
