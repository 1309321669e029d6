"""Hydra reads its mode from the whole configuration, which it composes once more for that: a quarter of what a short verb takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def mode_by_flag(line: Sequence[str]) -> Iterator[None]:
    """Inside, `--multirun` alone says whether Hydra sweeps, unless ``line`` sets ``hydra.mode``. A Hydra that asks in another way is left
    as it is."""
    from hydra._internal.hydra import Hydra

    usual = getattr(Hydra, "get_mode", None)
    if usual is None or any(word.lstrip("+").startswith("hydra.mode=") for word in line):
        yield
        return
    setattr(Hydra, "get_mode", lambda *_, **__: None)  # noqa: B010 - None is Hydra's own "not said"
    try:
        yield
    finally:
        setattr(Hydra, "get_mode", usual)  # noqa: B010
