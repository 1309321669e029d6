"""Rows of experts: each pair of a token and an expert goes where it belongs, whichever experts are computed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.planner.contract.experts.expert_cache import Routing
from penstock.runtime.experts.expert_forward import Arrived, Fit, WholeExperts
from penstock.runtime.experts.expert_rows import LEAST_STEP, TOGETHER, ExpertRows, heights, padded
from penstock.runtime.store.decoder import decoder_layers
from tests.runtime.whole_experts import take_over
from tests.support import save_tiny


@settings(deadline=None, max_examples=60)
@given(tokens=st.integers(2, 300), top_k=st.integers(1, 4), experts=st.integers(4, 40), high=st.booleans(), seed=st.integers(0, 10**6))
def test_each_pair_has_a_row_of_its_expert(tokens: int, top_k: int, experts: int, high: bool, seed: int) -> None:
    draw = np.random.default_rng(seed)
    chosen = np.stack([draw.permutation(experts)[:top_k] for _ in range(tokens)])
    order = torch.sort(torch.from_numpy(chosen.reshape(-1)), stable=True).indices
    height = partial(padded, tokens=tokens) if high else int
    rows = ExpertRows.of(order, chosen, experts, height)
    asked = [*draw.permutation(np.unique(chosen)).tolist()]
    met = np.zeros(chosen.size, int)
    while asked:
        fit = rows.fit(asked)
        together, asked = asked[:fit], asked[fit:]
        taken, places = rows.taken(together)
        assert len(taken) == sum(rows.heights(together)) and (fit == 1 or len(taken) <= max(TOGETHER * tokens, LEAST_STEP))
        begin = 0
        for expert, high_as in zip(together, rows.heights(together), strict=True):
            here = places[begin : begin + high_as]
            own = here[here < chosen.size]
            assert high_as == height(len(own)) and torch.equal(own, rows.own(expert)) and (here[len(own) :] == chosen.size).all()
            assert (chosen.reshape(-1)[own] == expert).all() and torch.equal(taken[begin : begin + len(own)], own // top_k)
            assert taken.max() < tokens
            met[own] += 1
            begin += high_as
    assert (met == 1).all()


class Together(WholeExperts):
    """All of them are there."""

    def __init__(self, layers: nn.ModuleList):
        super().__init__(layers)
        self.met: list[int] = []

    def visit(self, layer: int, routing: Routing, fit: Fit) -> Iterator[Sequence[Arrived]]:
        there = [one for (one,) in super().visit(layer, routing, fit)]
        while there:
            self.met.append(fit([expert for expert, _ in there]))
            yield there[: self.met[-1]]
            there = there[self.met[-1] :]


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_that_are_computed_together_say_what_each_says_alone(tmp_path: Path, model_type: str, tokens: int) -> None:
    checkpoint, found = save_tiny(tmp_path, model_type=model_type), []
    ids = torch.arange(tokens)[None] * 7 % 250
    for kind in (WholeExperts, Together):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        source = kind(decoder_layers(model))
        take_over(model, source)
        with torch.inference_mode():
            found.append(model(ids).logits)
    assert torch.equal(*found)
    assert isinstance(source, Together) and max(source.met) > 1


@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 65, 700, 5000])
def test_products_have_few_heights(tokens: int) -> None:
    met = heights(tokens)
    assert met[-1] == tokens and len(met) <= 1 + max(8, 8 * (tokens.bit_length() - 8)) + 1
    for rows in range(1, tokens + 1):
        height = padded(rows, tokens)
        assert height in met and rows <= height <= max(rows * 9 / 8, rows + 63)
