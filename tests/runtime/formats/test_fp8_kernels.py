"""FP8's kernels on Triton's interpreter: decoding bit for bit, products near those of the decoded matrix."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from penstock.runtime.formats.fp8 import Fp8

BLOCKS = {"blocks": ((128, 128), (-1, -1)), "rows": ((1, 0), (300, 1)), "tensor": ((0, 0), (1,))}
ROWS, COLUMNS = 300, 400


def test_kernels_compute_what_the_cpu_decodes() -> None:
    """With and without a card's own conversion, products of 1, 3 and 16 rows, and of nine experts in their slots. Triton reads its mode
    when it is imported."""
    pytest.importorskip("triton", reason="needs Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert [case["name"] for case in found] == [*BLOCKS]
    assert all(case["same"] and max(case["errors"]) < 2e-3 for case in found), found


def parts(block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """All codes, those that are not a number apart, in a random order."""
    codes = torch.randint(0, 254, (ROWS, COLUMNS), dtype=torch.uint8)
    codes = torch.where(codes == 127, 0, codes)
    scales = {(128, 128): (3, 4), (1, 0): (ROWS, 1), (0, 0): (1,)}[block]
    return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": torch.rand(scales) / 64}


def relative(made: torch.Tensor, want: torch.Tensor) -> float:
    return ((made.float() - want).abs().max() / want.abs().max()).item()


def case(name: str, block: tuple[int, int]) -> dict:
    """In F16: the interpreter has no products of BF16, and rounds to it in its own way."""
    from penstock.runtime.formats.kernels.fp8_triton import Fp8Kernels

    coding, given, bias, same, errors = Fp8(block), parts(block), torch.randn(ROWS).half(), [], []
    want = torch.empty(ROWS, COLUMNS, dtype=torch.float16)
    coding.decode(given, want)
    for hardware in (False, True):
        kernels, out = Fp8Kernels(hardware), torch.empty_like(want)
        kernels.decode(coding.on_card(given), out)
        same.append(torch.equal(out, want))
        for tokens in (1, 3, 16):
            x = torch.randn(tokens, COLUMNS).half() / 256
            made = kernels.linear(x, coding.on_card(given), bias)
            assert made is not None
            errors.append(relative(made, F.linear(x.float(), want.float(), bias.float())))
        assert kernels.linear(torch.randn(17, COLUMNS).half(), coding.on_card(given), None) is None
    slots, size = torch.empty(12, 1 << 17, dtype=torch.uint8), ROWS * COLUMNS
    experts = []
    for slot in (3, 0, 5, 7, 11, 2, 1, 9, 8):
        held, each = slots[slot], parts(block)
        held[:size].copy_(each["weight"].view(torch.uint8).flatten())
        scale = held[size : size + each["weight_scale"].nbytes].view(torch.float32)
        scale.copy_(each["weight_scale"].flatten())
        laid = scale.view(each["weight_scale"].shape)
        experts.append({"weight": held[:size].view(torch.float8_e4m3fn).view(ROWS, COLUMNS), "weight_scale": laid})
    for tokens in (1, len(experts)):
        x = torch.randn(tokens, COLUMNS).half() / 256
        made = Fp8Kernels(False).experts(x, [coding.on_card(expert) for expert in experts])
        assert made is not None
        for number, expert in enumerate(experts):
            weight = torch.empty(ROWS, COLUMNS)
            coding.decode(expert, weight)
            errors.append(relative(made[number], F.linear(x[number if tokens > 1 else 0].float(), weight)))
        begins = [expert["weight"].data_ptr() for expert in experts]
        table = torch.tensor([(begin - begins[4]) // 256 for begin in begins])
        errors.append(float(not torch.equal(Fp8Kernels(False).tabled(x, coding.on_card(experts[4]), table), made)))
    return {"name": name, "same": all(same), "errors": errors}


if __name__ == "__main__":
    torch.manual_seed(2)
    print(json.dumps([case(name, block) for name, (block, _) in BLOCKS.items()]))
