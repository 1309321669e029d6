"""The kernels of whole numbers give what torch decodes and multiplies; Triton's interpreter plays the card."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from penstock.runtime.formats import awq, gptq, pack_quantized
from penstock.runtime.formats.codings import CODINGS

ROWS, COLUMNS = 136, 384


def words(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32)


def scales(rows: int, columns: int) -> torch.Tensor:
    return (torch.rand(rows, columns) * 0.01 + 0.001).half()


def cases() -> dict[str, dict[str, torch.Tensor]]:
    """Name of a format and what is special -> parts of a matrix [ROWS, COLUMNS]."""
    order = (torch.randperm(COLUMNS) // 128).to(torch.int32)
    return {
        "INT4-128": {"weight_packed": words(ROWS, COLUMNS // 8), "weight_scale": scales(ROWS, 3)},
        "INT4-128 ordered": {"weight_packed": words(ROWS, COLUMNS // 8), "weight_scale": scales(ROWS, 3), "weight_g_idx": order},
        "INT4-32-asym": {
            "weight_packed": words(ROWS, COLUMNS // 8),
            "weight_scale": scales(ROWS, 12),
            "weight_zero_point": words(ROWS // 8, 12),
        },
        "INT8-64-asym": {
            "weight_packed": words(ROWS, COLUMNS // 4),
            "weight_scale": scales(ROWS, 6),
            "weight_zero_point": words(ROWS // 4, 6),
        },
        "INT8-row": {"weight": words(ROWS, COLUMNS // 4).view(torch.int8), "weight_scale": scales(ROWS, 1)},
        "GPTQ4-128": {"qweight": words(COLUMNS // 8, ROWS), "scales": scales(3, ROWS), "qzeros_less_one": words(3, ROWS // 8)},
        "GPTQ8-128-order": {"qweight": words(COLUMNS // 4, ROWS), "scales": scales(3, ROWS), "qzeros": words(3, ROWS // 4), "g_idx": order},
        "AWQ-64": {"qweight": words(COLUMNS, ROWS // 8), "scales": scales(6, ROWS), "qzeros": words(6, ROWS // 8)},
    }


def compare() -> dict[str, dict[str, object]]:
    """In F16: the interpreter rounds to BF16 in its own way."""
    from penstock.runtime.formats.kernels.int4_triton import WholeKernels

    torch.manual_seed(0)
    given, found = cases(), {}
    plain = {name: torch.empty(ROWS, COLUMNS, dtype=torch.float16) for name in given}
    for name, parts in given.items():
        CODINGS[name.split()[0]].decode(parts, plain[name])
    for module in (pack_quantized, gptq, awq):
        module.whole_kernels = lambda _: WholeKernels(4)
    for name, parts in given.items():
        coding, out, errors = CODINGS[name.split()[0]], torch.empty_like(plain[name]), []
        coding.decode(parts, out)
        for tokens, bias in ((1, None), (1, torch.randn(ROWS).half()), (5, torch.randn(ROWS).half())):
            x = torch.randn(tokens, COLUMNS).half()
            made = coding.linear(x, parts, bias)
            if made is not None:
                wanted = F.linear(x.double(), out.double(), None if bias is None else bias.double())
                errors.append(((made.double() - wanted).abs().max() / wanted.abs().max()).item())
        found[name] = {"same": torch.equal(out, plain[name]), "errors": errors}
    return found


def test_kernels_decode_to_the_same_bits_and_multiply_by_what_they_decode() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert set(found) == set(cases()) and all(case["same"] for case in found.values()), found
    assert {name: len(case["errors"]) for name, case in found.items()} == {name: 0 if name.startswith("AWQ") else 3 for name in found}
    assert all(error < 1e-3 for case in found.values() for error in case["errors"]), found


if __name__ == "__main__":
    print(json.dumps(compare()))
