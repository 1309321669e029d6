"""Speculative decoding says what plain decoding says, whoever drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.planner.contract.speculation.acceptance import Acceptance
from penstock.planner.contract.speculation.chain_length import ChainLength
from penstock.runtime.engine.generate import Batch, Generation, generate
from penstock.runtime.engine.sampling import Sampler, Sampling
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.speculate.chains import Chains
from penstock.runtime.speculate.drafter import Drafts, Proposer
from penstock.runtime.speculate.lookup_drafter import LookupDrafter
from tests.runtime.steppers import CPU, unstreamed
from tests.support import save_tiny


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """In float64, where passes of other shapes choose the same tokens. Computed by transformers."""
    checkpoint: Path = save_tiny(tmp_path_factory.mktemp("model"), layers=2)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def model(alone: nn.Module) -> nn.Module:
    """The same, computed in steps."""
    return deepcopy(alone)


class Played:
    """Drafts what will be said, each token right with the probability ``right``."""

    def __init__(self, said: Sequence[Sequence[int]], right: float, seed: int, vocab: int):
        self._said, self._right, self._draw, self._vocab = said, right, random.Random(seed), vocab

    def read(self, rows: Sequence[KvSequence]) -> None:
        """Nothing is remembered."""

    def propose(self, rows: Sequence[KvSequence], most: Sequence[int]) -> Drafts:
        return [self._behind(row.number, row.tokens, room) if room else () for row, room in zip(rows, most, strict=True)]

    def _behind(self, number: int, tokens: Sequence[int], most: int) -> Sequence[int]:
        at = next(len(tokens) - k for k in range(len(tokens), -1, -1) if list(tokens[len(tokens) - k :]) == list(self._said[number][:k]))
        coming = self._said[number][len(tokens) - at :][: self._draw.randint(0, most)]
        return [t if self._draw.random() < self._right else (t + 1) % self._vocab for t in coming]

    def forget(self, number: int) -> None:
        """Nothing is remembered."""


class Fixed(ChainLength):
    """Chains as long as may be."""

    def choose(self) -> int:
        return self.most


def chains(proposer: Proposer, most: int = 4) -> Chains:
    return Chains("played", proposer, Fixed(most, lambda drafts: 1.0, Acceptance(0.9)))


def run(model: nn.Module, batch: Batch, sampling: Sampling, drafts: Chains | None) -> Generation:
    return generate(unstreamed(model), batch, Sampler(sampling, CPU), chains=drafts)


SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.3, no_repeat_ngram=3),
    Sampling(temperature=1.0, top_k=50, seed=3),
    Sampling(temperature=0.8, top_p=0.9, frequency_penalty=0.5, seed=5),
]


@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_drafts_change_no_text(model: nn.Module, data: st.DataObject) -> None:
    """Of any prompts, batches, limits, stop tokens and ways to choose; with drafters that are right, wrong, and in between."""
    prompts = data.draw(st.lists(st.lists(st.integers(1, 250), min_size=1, max_size=12), min_size=1, max_size=3))
    limits = [data.draw(st.integers(1, 10)) for _ in prompts]
    stop = frozenset(data.draw(st.lists(st.integers(0, 255), max_size=40)))
    sampling = data.draw(st.sampled_from(SAMPLINGS))
    batch = Batch(prompts, max(limits), 8, stop, limits)
    plain = run(model, batch, sampling, None)
    played = Played(plain.tokens, data.draw(st.floats(0, 1)), data.draw(st.integers(0, 99)), 256)
    drafted = chains(data.draw(st.sampled_from([played, LookupDrafter()])))
    assert run(model, batch, sampling, drafted).tokens == plain.tokens
    assert drafted.counts.kept <= drafted.counts.drafted


def test_right_drafts_are_all_kept_and_save_their_passes(model: nn.Module) -> None:
    batch = Batch([[5, 9, 200, 31]], 16, 8)
    plain = run(model, batch, Sampling(), None)

    class Right(Played):
        def _behind(self, number: int, tokens: Sequence[int], most: int) -> Sequence[int]:
            return self._said[number][len(tokens) - 4 :][:most]

    drafted = chains(Right(plain.tokens, 1.0, 0, 256))
    made = run(model, batch, Sampling(), drafted)
    assert made.tokens == plain.tokens
    assert len(made.step_s) == 3  # 15 tokens after the first one, 5 a pass
    assert drafted.counts.kept == drafted.counts.drafted == 12
    assert drafted.facts()["tokens_a_pass"] == 5


def test_lookup_finds_what_followed_last_time() -> None:
    drafter = LookupDrafter()

    def behind(number: int, tokens: Sequence[int], most: int) -> list[int]:
        row = KvSequence.of(number, tokens)
        drafter.read([row])
        return list(drafter.propose([row], [most])[0])

    assert behind(0, [1, 2, 3, 4, 5, 1, 2, 3], 4) == [4, 5, 1, 2]
    assert behind(0, [1, 2, 3, 4, 5, 1, 2, 3, 9, 2, 3], 2) == [9, 2]
    assert behind(1, [7, 8], 2) == []
    assert behind(2, [6, 6, 6], 3) == [6, 6, 6]


def test_drawn_tokens_have_the_distribution_of_the_model(model: nn.Module, alone: nn.Module) -> None:
    """The second token of 3,000 replies, where the likeliest one is drafted: each as often as its probability says."""
    prompt, sampling = [5, 9, 200, 31], Sampling(temperature=1.0, top_k=4)
    expected: dict[int, float] = {}
    with torch.inference_mode():
        firsts = _top(alone(torch.tensor([prompt])).logits[0, -1], sampling.top_k)
        for token, share in firsts:
            for behind, probability in _top(alone(torch.tensor([[*prompt, token]])).logits[0, -1], sampling.top_k):
                expected[behind] = expected.get(behind, 0.0) + share * probability

    class Likeliest(Played):
        def _behind(self, number: int, tokens: Sequence[int], most: int) -> Sequence[int]:
            return [max(expected, key=expected.__getitem__)][:most]

    counts: Counter[int] = Counter()
    for seed in range(50):
        sampler = Sampler(replace(sampling, seed=1000 * seed), CPU)
        drafted = chains(Likeliest([], 1, 0, 256))
        made = generate(unstreamed(model, slots=60), Batch([prompt] * 60, 3, 8), sampler, chains=drafted)
        assert 0 < drafted.counts.kept < drafted.counts.drafted
        counts.update(tokens[1] for tokens in made.tokens)
    total, freedom = counts.total(), len(expected) - 1
    assert set(counts) <= set(expected)
    chi = sum((counts[token] - total * share) ** 2 / (total * share) for token, share in expected.items())
    assert chi < freedom + 5 * (2 * freedom) ** 0.5  # five deviations of a chi-squared variable


def _top(logits: torch.Tensor, count: int) -> list[tuple[int, float]]:
    best = torch.topk(logits, count)
    return list(zip(best.indices.tolist(), torch.softmax(best.values, -1).tolist(), strict=True))
