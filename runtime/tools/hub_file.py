"""One file of a model on the hub: fetched into a part beside its place, checked, then given its name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.common.errors import UserError

READ_BYTES = 8 * 2**20
Advance = Callable[[int], None]
"""Told of bytes as they come; of fewer than none when a server began again from the start."""


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it."""

    name: str
    nbytes: int
    digest: str
    """In hex: SHA-256 of a large file, git's SHA-1 of a blob for a small one."""
    url: str

    def part(self, directory: Path) -> Path:
        """Where it lies in ``directory`` while it is not whole; another content of that name has another part."""
        return directory / f".{self.name}.{self.digest[:12]}.part"

    def here(self, directory: Path) -> int:
        """Bytes of it that an earlier download left in ``directory``."""
        for path in (directory / self.name, self.part(directory)):
            if path.is_file():
                return min(path.stat().st_size, self.nbytes)
        return 0

    def fetch(self, directory: Path, advance: Advance) -> None:
        """Bring what is missing, check the whole, and give it its name. Memory: one buffer of 8 MiB.

        UserError when size or digest are not what the hub says; the part is removed then. What the network or the disk raises comes out
        as it is, with the part kept.
        """
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        part = self.part(directory)
        part.touch()
        with part.open("r+b") as file:
            have = file.seek(0, os.SEEK_END)
            if have > self.nbytes:
                have = file.seek(0)
                file.truncate()
            if have < self.nbytes:
                headers = build_hf_headers() | {"Accept-Encoding": "identity"}
                http_get(
                    self.url,
                    file,
                    resume_size=have,
                    headers=headers,
                    expected_size=self.nbytes,
                    displayed_filename=self.name,
                    tqdm_class=lambda **_: _Told(advance),  # type: ignore[arg-type]
                )
            file.flush()
            os.fsync(file.fileno())
        if not self.sound(part):
            part.unlink()
            raise UserError(f"{self.name}: damaged on the way, its digest is not the hub's; it was removed: fetch again")
        os.replace(part, directory / self.name)

    def sound(self, path: Path) -> bool:
        """Whether the file at ``path`` is this one: its size and its digest."""
        if path.stat().st_size != self.nbytes:
            return False
        git = len(self.digest) == hashlib.sha1().digest_size * 2
        state = hashlib.sha1(f"blob {self.nbytes}\0".encode(), usedforsecurity=False) if git else hashlib.sha256()
        with path.open("rb") as file:
            while data := file.read(READ_BYTES):
                state.update(data)
        return state.hexdigest() == self.digest


class _Told:
    """In place of a bar of tqdm, which huggingface_hub would draw: draws nothing, and tells ``advance``."""

    def __init__(self, advance: Advance):
        self._advance = advance

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is drawn, so nothing is left to close."""

    def update(self, count: float) -> None:
        self._advance(int(count))
