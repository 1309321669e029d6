"""The lossless form of BF16 gives back every bit, by C, by torch and by the kernel, and damaged escapes touch no other memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest
import torch

from penstock.runtime.formats.native import compiled as native
from penstock.runtime.formats.twelve.lossless import Lossless
from penstock.runtime.formats.twelve.lossless_encoding import codebook, count_exponents, encode


def _forget() -> None:
    for each in (native._library, native.compiled):
        each.cache_clear()


@pytest.fixture(params=["C", "torch"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the compiled library and without."""
    _forget()
    if request.param == "torch":
        monkeypatch.setattr("sysconfig.get_config_var", lambda name: ".of-another-python.so")
    yield request.param
    _forget()


def matrices() -> dict[str, torch.Tensor]:
    """Weights as they are trained, and all that a BF16 can be."""
    draw = torch.Generator().manual_seed(5)
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).view(256, 256)
    return {
        "weights": torch.randn(96, 192, generator=draw).mul_(0.02).bfloat16(),
        "every number, NaNs and denormals too": every[torch.randperm(256, generator=draw)].contiguous(),
        "zeros": torch.zeros(16, 8, dtype=torch.bfloat16),
        "one exponent": torch.full((3, 128), -1.5, dtype=torch.bfloat16),
        "many zeros": (torch.randn(64, 640, generator=draw) * (torch.rand(64, 640, generator=draw) > 0.5)).bfloat16(),
    }


def encoded(numbers: torch.Tensor, spare: int = 0) -> Mapping[str, torch.Tensor]:
    exponents, escapes = codebook(count_exponents(numbers))
    return encode(numbers, exponents, max(1, escapes + spare))


@pytest.mark.parametrize("spare", [0, 7])
@pytest.mark.parametrize("name", matrices())
def test_every_bit_comes_back(name: str, spare: int, ways: str) -> None:
    numbers = matrices()[name]
    out = torch.full_like(numbers, 7)
    Lossless().decode(encoded(numbers, spare), out)
    assert torch.equal(out.view(torch.int16), numbers.view(torch.int16))


@pytest.mark.parametrize("name", matrices())
def test_torch_makes_the_bytes_that_c_makes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = matrices()[name]
    _forget()
    here = encoded(numbers, 3)
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: ".of-another-python.so")
    _forget()
    there = encoded(numbers, 3)
    _forget()
    for leaf in here:
        assert torch.equal(here[leaf].view(torch.uint8), there[leaf].view(torch.uint8)), leaf


def test_trained_weights_take_twelve_bits_and_a_thousandth(ways: str) -> None:
    numbers = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    nbytes = sum(part.nbytes for part in encoded(numbers).values())
    assert 1.5 < nbytes / numbers.numel() < 1.502


def test_escapes_that_do_not_fit_are_not_lost_in_silence(ways: str) -> None:
    numbers = matrices()["every number, NaNs and denormals too"]
    exponents, escapes = codebook(count_exponents(numbers))
    with pytest.raises(ValueError, match=f"{escapes} escapes"):
        encode(numbers, exponents, escapes - 1)


@pytest.mark.parametrize("place", [-1, 96 * 192, 2**31 - 1])
def test_an_escape_outside_of_the_matrix_is_written_nowhere(place: int, ways: str) -> None:
    numbers = matrices()["weights"]
    parts = {name: part.clone() for name, part in encoded(numbers, 2).items()}
    parts["at"][0] = place
    around = torch.full((3 * numbers.numel(),), 7, dtype=torch.bfloat16)
    out = around[numbers.numel() : 2 * numbers.numel()].view(numbers.shape)
    Lossless().decode(parts, out)
    assert (around[: numbers.numel()] == 7).all() and (around[2 * numbers.numel() :] == 7).all()


def test_the_kernel_gives_the_same_bits() -> None:
    """In a process of its own, since Triton asks once whether it is interpreted."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) == len(matrices()) + 1 and all(found.values()), found


def interpreted() -> dict[str, bool]:
    from penstock.runtime.formats.kernels.lossless_triton import LosslessKernels

    same = {}
    for name, numbers in matrices().items():
        out = torch.full_like(numbers, 7)
        LosslessKernels().decode(encoded(numbers, 1), out)
        same[name] = torch.equal(out.view(torch.int16), numbers.view(torch.int16))
    around, numbers = torch.full((3, 96, 192), 7, dtype=torch.bfloat16), matrices()["weights"]
    parts = encoded(numbers, 2)
    parts["at"][:2] = torch.tensor([-1, numbers.numel()])
    LosslessKernels().decode(parts, around[1])
    return same | {"damaged": bool((around[0] == 7).all() and (around[2] == 7).all())}


if __name__ == "__main__":
    print(json.dumps(interpreted()))
