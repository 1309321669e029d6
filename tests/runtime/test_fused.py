"""What lies between products is computed by other kernels where a model's code is known, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.runtime.model.fused import fused_gates, fused_norms, fused_rotary
from penstock.runtime.model.fused.fused_gates import FusedGates
from penstock.runtime.model.fused.fused_norms import FusedNorms
from penstock.runtime.model.fused.fused_rotary import FusedRotary
from penstock.runtime.model.fused.known_code import reads_as

LAYERS = 2
IDS = torch.tensor([[5, 9, 31, 7]])


class Played:
    """Computes what kernels do by torch, and counts; nothing where it ``refuses``."""

    def __init__(self, refuses: bool = False):
        self.refuses, self.calls = refuses, dict.fromkeys(("norm", "sum", "gate", "rotate"), 0)

    def norm(self, x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, eps: float, exact: bool) -> Any:
        assert exact
        self.calls["norm" if more is None else "sum"] += 1
        total = x if more is None else x + more
        wide = total.float()
        normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        return None if self.refuses else (total, normed)

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> Any:
        self.calls["gate"] += 1
        return None if self.refuses else F.silu(gate) * up

    def rotate(self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        self.calls["rotate"] += 1
        if self.refuses:
            return None
        turned = []
        for one in (query, key):
            low, high = one.chunk(2, dim=-1)
            turned.append(one * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None])
        return tuple(turned)


def tiny(kind: str, **more: Any) -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "attn_implementation": "eager"}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more), dtype=torch.bfloat16).eval()


def convert(model: nn.Module) -> None:
    for converter in (FusedNorms(), FusedGates(), FusedRotary()):
        converter.convert(model)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@torch.inference_mode()
def test_a_model_says_the_same_to_the_bit_with_each_piece_computed_once(kind: str, refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, played = tiny(kind), Played(refuses)
    want = model(IDS).logits
    convert(model)
    for module in (fused_norms, fused_gates, fused_rotary):
        monkeypatch.setattr(module, "layer_kernels", lambda _: played)
    assert torch.equal(model(IDS).logits, want)
    of_heads = 2 * LAYERS if kind == "qwen3" else 0
    assert played.calls == {"norm": LAYERS + 1 + of_heads, "sum": LAYERS, "gate": LAYERS, "rotate": LAYERS}


def changed(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("llama", {"LlamaRMSNorm", "LlamaDecoderLayer", "LlamaMLP", "LlamaAttention"}),
        ("mixtral", {"MixtralRMSNorm", "MixtralDecoderLayer", "MixtralAttention"}),
        ("gemma2", {"Gemma2Attention"}),
        ("olmo2", {"Olmo2MLP"}),
    ],
)
def test_only_code_that_is_known_is_replaced(kind: str, wanted: set[str]) -> None:
    model = tiny(kind)
    convert(model)
    assert changed(model) == wanted


def test_a_gate_of_another_activation_stays() -> None:
    model = tiny("llama", hidden_act="gelu")
    convert(model)
    assert "LlamaMLP" not in changed(model)


def test_a_forward_that_somebody_gave_a_module_stays() -> None:
    model = tiny("llama")
    given = {
        module: lambda *_: None for module in model.modules() if type(module).__name__ in ("LlamaRMSNorm", "LlamaMLP", "LlamaAttention")
    }
    for module, forward in given.items():
        module.forward = forward
    convert(model)
    assert given and all(vars(module)["forward"] is forward for module, forward in given.items())


def test_code_is_compared_without_what_does_not_compute() -> None:
    def said(self: Any, x: int) -> int:
        """Words."""
        return x + 1  # more words

    assert reads_as(said, "def said(self, x):\n    return x + 1")
    assert not reads_as(said, "def said(self, x):\n    return x + 2")
    assert not reads_as(len, "def len(x):\n    return 0")
