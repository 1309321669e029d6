"""Units that the CPU computes in a recorded step: what comes back is what their modules compute, and the model is as it was afterwards."""

from __future__ import annotations

import time
from typing import cast

import pytest
import torch
from torch import nn

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.recorded.host_steps import HostSteps, host_unit
from penstock.runtime.recorded.recorded_stream import RecordedStream
from tests.cli import HANGS_S
from tests.runtime.test_slot_turns import PlayedGraph
from tests.support import HostCopier


class Gated(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(32, 48, bias=False, dtype=dtype) for _ in range(2))
        self.down_proj = nn.Linear(48, 32, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Plain(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 48, dtype=dtype), nn.Linear(48, 32, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x), approximate="tanh"))


class PlayedWords(PlayedGraph):
    """Words that a card would write and wait for: at once, and by looking."""

    written = 0
    """Words, so far."""

    def write_word(self, address: int, value: int) -> None:
        self.written += 1
        self._word(address).fill_(value)

    def wait_word(self, address: int, value: int) -> None:
        until = time.monotonic() + HANGS_S
        while int(self._word(address)) != value:
            assert time.monotonic() < until, "nobody answered"

    def _word(self, address: int) -> torch.Tensor:
        import ctypes

        return torch.frombuffer((ctypes.c_int32 * 1).from_address(address), dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("made", "activation"), [(Gated, "silu"), (Plain, "gelu_tanh")])
@pytest.mark.parametrize(("rows", "in_turn"), [(1, False), (3, False), (2, True)])
def test_what_the_cpu_computes_comes_back(
    made: type[Gated | Plain], activation: str, rows: int, in_turn: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **more: zeros(*a, **more))  # a machine without a card pins nothing
    torch.manual_seed(rows)
    modules = [made(dtype) for _ in range(3)]
    units = []
    for i, module in enumerate(modules):
        tensors = {f"mlp.{name}": p.detach() for name, p in module.named_parameters()}
        units.append(host_unit(Unit("ffn", i), "mlp", module, tensors, activation, dtype))
    ledger, words = Ledger(), PlayedWords()
    stream = RecordedStream((), {}, words, ledger)
    with HostPool(2) as pool:
        steps = HostSteps(pool, units, rows, HostCopier(), ledger, in_turn)
        x = torch.randn(1, rows, 32, dtype=dtype)
        for _ in range(3):
            steps.begin_step()
            with steps.computing(words, stream) as fed, torch.inference_mode():
                got, said = [], words.written
                for i, module in enumerate(modules):
                    for unit in (Unit("ffn", i - 1), Unit("attn", i)):
                        fed.enter(unit)
                    assert words.written == said + in_turn, "a unit is near when its layer's attention begins"
                    got.append(module(x))
                    said = words.written
            for module, out in zip(modules, got, strict=True):
                assert out.shape == x.shape and out.dtype is dtype
                want = cast(torch.Tensor, module(x)).float()
                assert torch.allclose(out.float(), want, atol=0.02 * want.abs().max().item(), rtol=0)
            steps.settle()
        steps.close()
    assert ledger.totals()["cpu"].bytes == 3 * sum(unit.ffn.bytes for unit in units)
