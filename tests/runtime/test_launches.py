"""Operations of a layer, counted while a tiny model computes, against those that predictions go by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaModel, MixtralConfig, MixtralModel

from penstock.planner.common.outside.cache_name import cache_name
from penstock.planner.contract.experts.expert_cache import Routing
from penstock.planner.contract.given.model import Experts
from penstock.planner.contract.prices.launches import OPERATIONS
from penstock.runtime.experts.expert_forward import Arrived, Fit, WholeExperts
from tests.runtime.whole_experts import take_over

CLOSE = 0.15
ROUTED = Experts(8, 2, 1, (0,), tuple(n / 8 for n in range(9)))


class Counter(TorchDispatchMode):
    """Calls that reach the dispatcher."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


class KeptViews(WholeExperts):
    """As a run has them: tensors of slots are made once."""

    def __init__(self, layers: nn.ModuleList):
        super().__init__(layers)
        self._made: dict[tuple[int, int], Mapping[str, torch.Tensor]] = {}

    def visit(self, layer: int, routing: Routing, fit: Fit) -> Iterator[Sequence[Arrived]]:
        missing = [expert for expert in routing.experts if (layer, expert) not in self._made]
        if missing:
            self._made |= {(layer, e): views for ((e, views),) in super().visit(layer, routing, fit)}
        for expert in routing.experts:
            yield [(expert, self._made[layer, expert])]


def model_of(layers: int, routed: bool) -> LlamaModel | MixtralModel:
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=500, num_hidden_layers=layers,
        dtype=torch.bfloat16,
    )  # fmt: skip
    if not routed:
        return LlamaModel(LlamaConfig(**sizes)).to(torch.bfloat16).eval()
    model = MixtralModel(MixtralConfig(num_local_experts=8, num_experts_per_tok=2, **sizes)).to(torch.bfloat16).eval()
    take_over(model, KeptViews(model.layers))
    return model


def calls(layers: int, routed: bool, tokens: int, cached: int) -> int:
    """Of the second pass over some tokens, behind ``cached`` ones: the first one makes what is kept."""
    model = model_of(layers, routed)
    ids, place = torch.arange(tokens)[None], torch.arange(cached, cached + tokens)[None]
    for _ in range(2):
        name = cache_name(model.forward)
        cache = model(input_ids=torch.arange(cached)[None], use_cache=True)[name] if cached else None
        with Counter() as counter:
            model(input_ids=ids, position_ids=place, use_cache=True, **{name: cache})
    return counter.calls


@pytest.mark.parametrize("tokens, cached, more", [(1, 4, 0), (400, 4, OPERATIONS.behind), (400, 0, OPERATIONS.prompt)])
@pytest.mark.parametrize("routed", [False, True])
def test_a_layer_has_the_operations_that_are_counted_for_it(routed: bool, tokens: int, cached: int, more: int) -> None:
    with torch.inference_mode():
        found = (calls(6, routed, tokens, cached) - calls(2, routed, tokens, cached)) / 4
    counted = more + (OPERATIONS.routed(ROUTED, tokens, gpu=False) if routed else OPERATIONS.dense(gpu=False))
    assert found == pytest.approx(counted, rel=CLOSE)
    if not routed or tokens == 1:
        assert found == pytest.approx(counted, abs=1)  # versions of transformers differ by one


def test_a_cards_coded_experts_are_launched_together_where_one_token_asks() -> None:
    """Whatever the token's experts are, as many launches: an engine calls one kernel a product for all of them."""
    for top_k in (2, 8):
        experts = Experts(8, top_k, 1, (0,), tuple(n / 8 for n in range(9)))
        assert OPERATIONS.routed(experts, 1, gpu=True, grouped=True) == OPERATIONS.routed(ROUTED, 1, gpu=True, grouped=True)
        assert OPERATIONS.in_pieces(experts, 1, tabled=True) < OPERATIONS.in_pieces(experts, 1, tabled=False)


@pytest.mark.parametrize(("dense_s", "measured_s"), [(674e-6, 1.61e-3), (1.26e-3, 2.7e-3)], ids=["H200", "host of two H100s"])
def test_a_launched_layer_of_gpt_oss_takes_what_was_measured(dense_s: float, measured_s: float) -> None:
    """bench/gpt_oss.py with steps that were not recorded, 2026-11-24 and 2026-11-23."""
    each = OPERATIONS.routed(Experts(128, 4, 1, (0,), tuple(n / 128 for n in range(129))), 1, gpu=True, grouped=True)
    assert each / OPERATIONS.dense(True) * dense_s == pytest.approx(measured_s, rel=0.1)
