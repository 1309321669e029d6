"""A kernel that is launched again is the one that was compiled for such arguments, and is given addresses; a played Triton compiles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.runtime.formats.kernels.launching import Launcher


class Compiled:
    packed_metadata = ()

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given: self.given.append((grid, *given))


class Kernel:
    """Compiles at each call, as Triton does where it has not compiled for such arguments."""

    arg_names = ("x", "out", "count", "columns", "eps", "ADD", "WIDE")
    do_not_specialize = ("count",)

    def __init__(self) -> None:
        self.made: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def compile_(*given: Any, **constants: Any) -> Compiled:
            assert all(isinstance(one, torch.Tensor) for one in given[:2])
            self.made.append(Compiled())
            return self.made[-1]

        return compile_


EVEN = torch.zeros(64)
FIRST: dict[str, Any] = {"x": EVEN, "out": EVEN[16:], "count": 7, "columns": 32, "eps": 1e-5, "ADD": False, "WIDE": 64, "num_warps": 4}


def launch(launcher: Launcher, **changed: Any) -> None:
    given = FIRST | changed
    launcher((3,), *(given.pop(name) for name in ("x", "out", "count", "columns", "eps")), **given)


@pytest.mark.parametrize(
    "changed",
    [{"x": EVEN[4:]}, {"count": 16}, {"columns": 48}, {"eps": 1e-6}, {"count": 1}],
    ids=["another address", "another count", "another multiple of 16", "another small number", "a count of one"],
)
def test_what_was_compiled_is_launched_by_addresses(changed: dict[str, Any]) -> None:
    launcher = Launcher(kernel := Kernel())
    launch(launcher)
    launch(launcher, **changed)
    launch(launcher)
    (made,) = kernel.made
    given = FIRST | changed
    assert made.given[0] == (
        (3, 1, 1),
        given["x"].data_ptr(),
        EVEN[16:].data_ptr(),
        given["count"],
        given["columns"],
        given["eps"],
        False,
        64,
    )
    assert made.given[1][1] == EVEN.data_ptr() and len(made.given) == 2


OTHERS: list[dict[str, Any]] = [
    {"x": EVEN[1:]}, {"out": EVEN[2:]}, {"x": EVEN.half()}, {"count": 1 << 31}, {"columns": 33}, {"columns": 1}, {"ADD": True},
    {"num_warps": 8},
]  # fmt: skip


@pytest.mark.parametrize("changed", OTHERS)
def test_what_was_not_compiled_is(changed: dict[str, Any]) -> None:
    launcher = Launcher(kernel := Kernel())
    for again in ({}, changed, {}, changed):
        launch(launcher, **again)
    assert [len(made.given) for made in kernel.made] == [1, 1]


def test_what_an_interpreter_runs_is_kept_by_nobody() -> None:
    ran: list[tuple[Any, ...]] = []

    class Interpreter(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            return lambda *given, **_: ran.append(given)

    launcher = Launcher(Interpreter())
    launch(launcher)
    launch(launcher)
    assert len(ran) == 2 and all(given[0] is EVEN for given in ran)
