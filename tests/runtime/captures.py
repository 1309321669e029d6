"""A played card that is told what to record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Self


class Capturing:
    """Inside :meth:`recording` what comes is recorded: whoever plays the card looks at ``captures``."""

    captures = False

    @property
    def pieces(self) -> Self:
        """Of its kernels, which take words as it does."""
        return self

    def warming(self) -> nullcontext[None]:
        return nullcontext()

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.captures = True
        yield
        self.captures = False
