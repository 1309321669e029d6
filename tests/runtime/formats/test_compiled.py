"""The decoders in C are found, run on several threads at once and after a fork, and are refused when they are of other sources."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.planner.common.errors import UserError
from penstock.runtime.formats.codings import CODINGS
from penstock.runtime.formats.native import compiled as native


@pytest.fixture(autouse=True)
def _loaded_anew() -> Iterator[None]:
    for each in (native._library, native.compiled):
        each.cache_clear()
    yield
    for each in (native._library, native.compiled):
        each.cache_clear()


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def exponents(numbers: torch.Tensor) -> list[int]:
    """How often each occurs, counted in C."""
    count, found = native.compiled("lossless_count"), torch.zeros(256, dtype=torch.int64)
    assert count is not None, "this suite runs with the compiled library"
    count(numbers, found, numbers.numel())
    return found.tolist()


def numbers(seed: int, size: int = 1 << 20) -> tuple[torch.Tensor, list[int]]:
    made = torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return made, torch.bincount(made.view(torch.int16).int() >> 7 & 255, minlength=256).tolist()


def test_callers_at_once_get_their_own_results(threads: int) -> None:
    given = [numbers(seed) for seed in range(6)]
    found: dict[int, list[int]] = {}

    def call(number: int) -> None:
        for _ in range(5):
            found[number] = exponents(given[number][0])
            assert found[number] == given[number][1]

    callers = [threading.Thread(target=call, args=(i,)) for i in range(len(given))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [found[i] for i in range(len(given))] == [right for _, right in given]


def test_a_forked_process_makes_its_own_threads(threads: int) -> None:
    made, right = numbers(1)
    assert exponents(made) == right
    fork = multiprocessing.get_context("fork")
    answer = fork.SimpleQueue()
    child = fork.Process(target=lambda: answer.put(exponents(made) == right), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0 and answer.get()


def test_a_library_that_cannot_be_loaded_is_named_with_what_builds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_decoders.so").write_text("no library")
    monkeypatch.setattr(native, "library_file", lambda: tmp_path / "_decoders.so")
    with pytest.raises(UserError, match=r"_decoders\.so.*pip install") as refused:
        native.compiled("fp8_decode")
    assert "\n" not in str(refused.value)


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="other sources"):
        native.compiled("fp9_decode")
    native._library.cache_clear()
    monkeypatch.setattr(native, "VERSION", 0)
    with pytest.raises(UserError, match="other sources"):
        native.compiled("fp8_decode")


def test_without_a_compiler_there_is_none_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.uncompiled() is None
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: ".of-another-python.so")
    assert native.compiled("fp8_decode") is None
    told = native.uncompiled()
    assert told and "C compiler" in told


def test_what_is_no_plain_memory_is_not_handed_to_c() -> None:
    decode = native.compiled("lossless_count")
    assert decode is not None
    with pytest.raises(ValueError, match="strides"):
        decode(torch.zeros(4, 4, dtype=torch.bfloat16).T, torch.zeros(256, dtype=torch.int64), 16)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "grid"),
    [("FP8", 384, 256, (3, 2)), ("FP8", 200, 300, (2, 3)), ("FP8-row", 200, 300, (200, 1)), ("FP8-tensor", 200, 300, (1, 1))],
)
def test_fp8_is_decoded_in_c_as_torch_does(
    name: str, rows: int, columns: int, grid: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.arange(rows * columns).remainder(256).to(torch.uint8).view(rows, columns).view(torch.float8_e4m3fn)
    parts = {"weight": weight, "weight_scale": torch.rand(grid, generator=torch.Generator().manual_seed(3)) * 1e-2}
    out, right = torch.empty(rows, columns, dtype=torch.bfloat16), torch.empty(rows, columns, dtype=torch.bfloat16)
    CODINGS[name].decode(parts, out)
    native.compiled.cache_clear()
    native._library.cache_clear()
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: ".of-another-python.so")
    CODINGS[name].decode(parts, right)
    assert torch.equal(out.isnan(), right.isnan()) and out.isnan().any()
    assert torch.equal(out[~out.isnan()].view(torch.int16), right[~right.isnan()].view(torch.int16)), "zeros keep their signs, too"
