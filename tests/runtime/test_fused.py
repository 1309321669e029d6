"""What lies between products is computed by other kernels where a model's code is known, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.deprecation import deprecate_kwarg

from penstock.planner.contract.given.formats import FORMATS
from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.scratch import Scratch
from penstock.runtime.formats.stored_linear import DECODED, StoredLinear
from penstock.runtime.formats.stored_parameters import StoredParameter
from penstock.runtime.model.fused import fused_gates, fused_norms, fused_rotary
from penstock.runtime.model.fused.direct import ATTENDS, Bare, called, product
from penstock.runtime.model.fused.fused_gates import FusedGates
from penstock.runtime.model.fused.fused_norms import FusedNorms
from penstock.runtime.model.fused.fused_products import FusedProducts
from penstock.runtime.model.fused.fused_rotary import FusedRotary
from penstock.runtime.model.fused.known_code import children_called, given_alike, reads_as, undecorated

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


@dataclass(frozen=True)
class Joining:
    """Plain matrices as a format of their own, multiplied together; ``calls`` has how many at once."""

    calls: list[int] = field(default_factory=list, hash=False, compare=False)

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        out.copy_(parts["weight"])

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor:
        self.calls.append(1)
        return F.linear(x, parts["weight"], bias)

    def joined(self, x: torch.Tensor, matrices: Sequence[Parts]) -> torch.Tensor:
        self.calls.append(len(matrices))
        return torch.cat([F.linear(x, parts["weight"]) for parts in matrices], dim=-1)


def stored(model: nn.Module, coding: Joining, *names: str) -> list[StoredLinear]:
    """``model``'s layers of these names, coded so."""
    found = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names:
                parts, known = {"weight": child.weight}, {"weight": StoredParameter("BF16", (name,))}
                found.append(StoredLinear(child, FORMATS["BF16"], coding, parts, known, Scratch(1 << 16)))
                setattr(module, name, found[-1])
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@torch.inference_mode()
def test_one_token_is_multiplied_by_layers_beside_each_other_at_once(kind: str) -> None:
    model, coding, one = tiny(kind), Joining(), IDS[:, :1]
    want, of_prompt = model(one).logits, model(IDS).logits
    layers = stored(model, coding, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    convert(model)
    FusedProducts().convert(model)
    assert torch.equal(model(one).logits, want) and coding.calls == [3, 2] * LAYERS
    coding.calls.clear()
    assert torch.equal(model(IDS).logits, of_prompt) and coding.calls == [1] * 5 * LAYERS
    coding.calls.clear()
    for layer in layers:  # a second input before the others were asked, and one that stays decoded
        layer.register_parameter(DECODED, layer.weight)
    assert torch.equal(model(one).logits, want) and coding.calls == []


@torch.inference_mode()
def test_what_was_made_for_one_tensor_is_given_for_no_other() -> None:
    model, coding = tiny("llama"), Joining()
    q, k, v = stored(model.model.layers[0].self_attn, coding, "q_proj", "k_proj", "v_proj")
    FusedProducts().convert(model)
    x, other = (torch.randn(1, 1, 32).bfloat16() for _ in range(2))
    q(x)
    assert torch.equal(k(other), F.linear(other, k.weight)) and torch.equal(v(x), F.linear(x, v.weight))
    q(x), q(other)
    assert torch.equal(k(x), F.linear(x, k.weight)) and torch.equal(k(other), F.linear(other, k.weight))
    assert torch.equal(k(other), F.linear(other, k.weight))


def test_only_decorators_that_rename_arguments_are_seen_through() -> None:
    def forward(hidden: torch.Tensor, given: int = 0) -> torch.Tensor:
        return hidden + given

    @wraps(forward)
    def twice(*args: Any, **named: Any) -> torch.Tensor:
        return forward(*args, **named) * 2

    renames = deprecate_kwarg("old", version="99.0", new_name="given")
    assert undecorated(forward) is undecorated(renames(forward)) is forward
    assert undecorated(twice) is undecorated(renames(twice)) is twice


def test_code_gives_layers_the_same_input_or_not() -> None:
    class Given:
        def alike(self: Any, x: int) -> int:
            return self.q(x) + self.k(x).view(2)

        def changed(self: Any, x: int) -> int:
            made = self.q(x)
            x = made + 1
            return self.k(x)

        def twice(self: Any, x: int) -> int:
            return self.q(x) + self.q(x) + self.k(x)

        def others(self: Any, x: int, y: int) -> int:
            return self.q(x) + self.k(y)

        def more(self: Any, x: int) -> int:
            return self.q(x + 1) + self.k(x + 1)

    found = {name: given_alike(function, ("q", "k")) for name, function in vars(Given).items() if callable(function)}
    assert found == {"alike": True, "changed": False, "twice": False, "others": False, "more": False}


def runs_bare(attention: nn.Module) -> bool:
    return isinstance(vars(attention)["forward"].args[0], Bare)


@pytest.mark.parametrize(("kind", "bare"), [("llama", True), ("qwen3", True), ("gemma2", True), ("mixtral", True), ("cohere", True)])
@torch.inference_mode()
def test_an_attentions_code_that_only_calls_its_children_runs_bare(kind: str, bare: bool) -> None:
    model = tiny(kind)
    want = model(IDS).logits
    convert(model)
    found = [module for module in model.modules() if type(module).__name__.endswith("Attention") and "forward" in vars(module)]
    assert all(runs_bare(attention) == bare for attention in found)
    assert torch.equal(model(IDS).logits, want)


@torch.inference_mode()
def test_what_was_hooked_to_a_child_or_put_in_its_place_is_asked() -> None:
    model, seen = tiny("llama"), list[str]()
    want = model(IDS).logits
    convert(model)
    attention = model.model.layers[0].self_attn
    attention.q_proj.register_forward_pre_hook(lambda *_: seen.append("before"))
    attention.k_proj.register_forward_hook(lambda *_: seen.append("behind"))
    own = attention.v_proj.forward
    attention.v_proj.forward = lambda x: (seen.append("in place"), own(x))[1]
    assert torch.equal(model(IDS).logits, want) and seen == ["before", "behind", "in place"]
    attention.o_proj = nn.Identity()  # as a converter does
    assert not torch.equal(model(IDS).logits, want)


@torch.inference_mode()
def test_attention_that_was_given_what_it_attends_by_asks_that() -> None:
    model, asked = tiny("llama"), list[nn.Module]()
    convert(model)
    attention = model.model.layers[1].self_attn

    def attend(module: nn.Module, query: torch.Tensor, *_: Any, **more: Any) -> tuple[torch.Tensor, None]:
        asked.append(module)
        assert more["scaling"] == attention.scaling
        return query.transpose(1, 2), None

    setattr(attention, ATTENDS, attend)
    model(IDS)
    assert asked == [attention]


def test_hooks_change_what_they_change_in_torch() -> None:
    def hooked(module: nn.Module) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: args[0] + 1)
        module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        module.register_forward_hook(lambda _, args, made: made + args[0])
        module.register_forward_hook(lambda *_: None)
        return module

    plain, x = nn.Linear(3, 3), torch.ones(1, 3)
    assert torch.equal(product(plain, x), plain(x))
    assert torch.equal(called(hooked(plain), x), plain(x)) and torch.equal(product(plain, x), plain(x))
    plain.register_forward_hook(lambda _, args, given, made: made * 3, with_kwargs=True)
    assert torch.equal(called(plain, x), plain(x))


def test_code_that_does_more_with_its_object_is_known_to_do_so() -> None:
    model = tiny("llama")
    forward = undecorated(type(model.model.layers[0].self_attn).forward)
    assert children_called(forward) == {"q_proj", "k_proj", "v_proj", "o_proj"}

    def sets(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.last = self.q_proj(x)
        return self.last

    def hands_itself_on(self: Any, x: torch.Tensor) -> torch.Tensor:
        return sets(self, x)

    assert children_called(sets) is None and children_called(hands_itself_on) is None and children_called(len) is None
