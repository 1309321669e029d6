"""Products of one row with several experts' matrices as they are, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

SLOT = 1 << 14
ROWS, COLUMNS = 44, 72


def test_kernels_multiply_by_the_experts_that_the_table_names() -> None:
    """Triton reads its mode when it is imported."""
    pytest.importorskip("triton", reason="needs Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found["errors"]) == 24 and max(found["errors"]) < 1e-3, found
    assert found["gathered"], found


def cases() -> list[float]:
    from penstock.runtime.formats.kernels.plain_triton import PlainKernels

    errors, kernels = [], PlainKernels()
    for dtype in (torch.float16, torch.float32):
        for turned in (False, True):
            shape, size = (COLUMNS, ROWS) if turned else (ROWS, COLUMNS), dtype.itemsize
            slots = torch.empty(5, SLOT, dtype=torch.uint8)
            weights = [slot[: ROWS * COLUMNS * size].view(dtype).view(shape).copy_(torch.randn(shape) / 9) for slot in slots]
            biases = [slot[-512 : -512 + ROWS * size].view(dtype).copy_(torch.randn(ROWS)) for slot in slots]
            chosen = [3, 0, 4]
            table = torch.tensor([(slot - 1) * (SLOT // 256) for slot in chosen])
            for height in (1, len(chosen)):
                x = torch.randn(height, COLUMNS).to(dtype)
                made = kernels.tabled(x, weights[1], biases[1], table, turned)
                assert made is not None and kernels.tabled(x.bfloat16(), weights[1], None, table, turned) is None
                for number, slot in enumerate(chosen):
                    weight = weights[slot].float().T if turned else weights[slot].float()
                    want = F.linear(x[number if height > 1 else 0].float(), weight, biases[slot].float())
                    errors.append(((made[number].float() - want).abs().max() / want.abs().max()).item())
    return errors


def gathered() -> bool:
    """Experts of more words than one program copies."""
    from penstock.runtime.formats.kernels.plain_triton import PlainKernels

    slots, chosen, words = torch.randint(0, 99, (6, 3200)), [4, 0, 5], 2500
    out = torch.zeros(len(chosen), words, dtype=torch.int64)
    table = torch.tensor([(slot - 2) * slots.shape[1] // 32 for slot in chosen])
    PlainKernels().gather(slots[2, :1], table, out)
    return torch.equal(out, slots[chosen, :words])


if __name__ == "__main__":
    torch.manual_seed(1)
    print(json.dumps({"errors": cases(), "gathered": gathered()}))
