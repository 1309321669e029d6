"""VRAM that several processes of a host write to, past torch: one takes it, the others open it by its handle."""

from __future__ import annotations

import ctypes

HANDLE_BYTES = 64
"""``CU_IPC_HANDLE_SIZE``."""
_OPEN_PEER = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class VramHandles:
    """What this process took and opened, on the card whose context the calling thread has current. RuntimeError where the driver refuses:
    cards that do not reach each other, a system without such handles."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._own: list[int] = []
        self._others: list[int] = []

    def take(self, nbytes: int) -> tuple[int, bytes]:
        """So many bytes of VRAM: their address here, and the handle by which other processes open them."""
        address, handle = ctypes.c_uint64(), _Handle()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._own.append(address.value)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return address.value, ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """The address here of what another process took. It stays that one's."""
        address, given = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(given), handle, HANDLE_BYTES)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_OPEN_PEER))
        self._others.append(address.value)
        return address.value

    def leave(self) -> None:
        """Nothing of this process copies to what it opened any more."""
        while self._others:
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(self._others.pop()))

    def give_back(self) -> None:
        """The others have left what was taken here."""
        while self._own:
            self._call("cuMemFree_v2", ctypes.c_uint64(self._own.pop()))

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {code}")
