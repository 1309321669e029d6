"""Speculative decoding says what plain decoding says, whoever drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from penstock.planner.contract.speculation.acceptance import Acceptance
from penstock.planner.contract.speculation.chain_length import ChainLength
from penstock.runtime.engine.passes.generate import Batch, Finished, Generation, generate, generating
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.speculate.chains import Chains
from penstock.runtime.speculate.drafter import Drafts, Proposer
from penstock.runtime.speculate.lookup_drafter import LookupDrafter
from tests.runtime.speculate.two_drafts import DRAFTS, LOGITS, TEMPERATURE, TOP_K, hold_to_the_model
from tests.runtime.steppers import CPU, unstreamed
from tests.support import save_tiny

KINDS: dict[str, dict[str, object]] = {"llama": {}, "mistral": {"sliding_window": 8}, "qwen3_moe": {}}
"""Classes of models: one whose K and V stay, one whose window leaves them behind, one whose rows visit other experts."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    """In float64, where passes of other shapes choose the same tokens."""
    where, made = tmp_path_factory.mktemp("models"), {}
    for kind, more in KINDS.items():
        path = save_tiny(where / kind, kind, layers=2, **more)  # type: ignore[arg-type]
        made[kind] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()
    return made


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


def run(model: nn.Module, batch: Batch, sampling: Sampling, drafts: Chains | None, finished: Finished | None = None) -> Generation:
    return generate(unstreamed(model), batch, Sampler(sampling, CPU), finished=finished, chains=drafts)


def ended_by(pair: Sequence[int] | None) -> Finished:
    """Stop texts end a reply so: whatever stands there, wherever a pass ends."""
    return lambda tokens: [pair is not None and any(tuple(t[k : k + 2]) == tuple(pair) for k in range(len(t))) for t in tokens]


SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.3, no_repeat_ngram=3),
    Sampling(temperature=1.0, top_k=50, seed=3),
    Sampling(temperature=0.8, top_p=0.9, frequency_penalty=0.5, seed=5),
]


@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_drafts_change_no_text(models: dict[str, nn.Module], data: st.DataObject) -> None:
    """Of any models, prompts, batches, limits, stop tokens, stop texts and ways to choose; with drafters that are right, wrong, and in
    between; also behind a reply that was broken off between two passes."""
    model = models[data.draw(st.sampled_from(sorted(models)))]
    prompts = data.draw(st.lists(st.lists(st.integers(1, 250), min_size=1, max_size=12), min_size=1, max_size=3))
    limits = [data.draw(st.integers(1, 10)) for _ in prompts]
    stop = frozenset(data.draw(st.lists(st.integers(0, 255), max_size=40)))
    sampling = data.draw(st.sampled_from(SAMPLINGS))
    batch = Batch(prompts, max(limits), 8, stop, limits)
    whole = run(model, batch, sampling, None)
    pairs = [pair for tokens in whole.tokens for pair in zip(tokens, tokens[1:], strict=False)]
    finished = ended_by(data.draw(st.sampled_from([None, *pairs])))
    plain = run(model, batch, sampling, None, finished)
    played = Played(whole.tokens, data.draw(st.floats(0, 1)), data.draw(st.integers(0, 99)), 256)
    drafted, stepper = chains(data.draw(st.sampled_from([played, LookupDrafter()]))), unstreamed(model)
    free = stepper.pool.pages.free
    broken = generating(stepper, batch, Sampler(sampling, CPU), chains=drafted)
    for _ in range(data.draw(st.integers(0, 3))):
        next(broken, None)
    broken.close()
    assert stepper.pool.pages.free == free
    assert generate(stepper, batch, Sampler(sampling, CPU), finished=finished, chains=drafted).tokens == plain.tokens
    assert drafted.counts.kept <= drafted.counts.drafted


def test_right_drafts_are_all_kept_and_save_their_passes(models: dict[str, nn.Module]) -> None:
    model = models["llama"]
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


def test_drawn_tokens_have_the_distribution_of_the_model() -> None:
    """100,000 draws: each reply to two drafts, which are kept or not, as often as its probability says."""
    rows = 1000
    choice = Sampler(Sampling(temperature=TEMPERATURE, top_k=TOP_K, seed=7), CPU).begin([[0]] * rows)
    hold_to_the_model(lambda: map(tuple, choice.keep(LOGITS.repeat(rows, 1), range(rows), [DRAFTS] * rows)))


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize(
    "keys",
    [
        {"repetition_penalty": 1.6},
        {"frequency_penalty": 0.9, "presence_penalty": 1.1},
        {"repetition_penalty": 1.2, "no_repeat_ngram": 2, "presence_penalty": 0.5},
    ],
)
def test_penalties_look_back_at_drafts_as_at_what_was_said(temperature: float, keys: dict[str, Any]) -> None:
    """All places at once say what one after the other says: in batches of unequal chains, some kept whole and some not at all."""
    draw, random_logits = random.Random(4), torch.Generator().manual_seed(4)
    sampling = Sampling(temperature=temperature, seed=3, **keys)
    prompts = [[1, 2, 1], [5], [6, 6]]
    at_once, in_turn = (Sampler(sampling, CPU).begin(prompts) for _ in range(2))
    kept = 0
    for _ in range(60):
        counts = [draw.randrange(5) for _ in prompts]
        rows = [torch.randn(count + 1, 9, generator=random_logits) * 2 for count in counts]
        drafts, want = [], []
        for k, own in enumerate(rows):
            said = [int(in_turn(own[:1], [k]))]
            draft = []
            for row in own[1:]:
                right = draw.random() < 0.7
                draft.append(said[-1] if right else (said[-1] + 1) % 9)
                if not right:
                    break
                said.append(int(in_turn(row[None], [k])))
            draft += [draw.randrange(9) for _ in range(len(own) - 1 - len(draft))]
            drafts.append(draft)
            want.append(said)
        assert at_once.keep(torch.cat(rows), range(3), drafts) == want
        kept += sum(len(said) - 1 for said in want)
    assert kept > 60


def test_penalised_drawn_tokens_have_the_distribution_of_the_model() -> None:
    """20,000 draws, each place penalised for the drafts before it."""
    rows, keys = 1000, Sampling(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.8, seed=7)
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)) * 1.5
    drafts = [int(logits[0].topk(2).indices[1]), int(logits[1].topk(2).indices[1])]

    def chances(row: int, said: Sequence[int]) -> list[float]:
        scores = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[0, *said]]), logits[row : row + 1].clone())[0]
        for token in set(said):
            scores[token] -= 0.8
        return torch.softmax(scores / keys.temperature, -1).double().tolist()

    first, second, last = chances(0, []), chances(1, drafts[:1]), chances(2, drafts)
    kept, both = first[drafts[0]], first[drafts[0]] * second[drafts[1]]
    expected = {(t,): p for t, p in enumerate(first) if t != drafts[0]}
    expected |= {(drafts[0], t): kept * p for t, p in enumerate(second) if t != drafts[1]}
    expected |= {(*drafts, t): both * p for t, p in enumerate(last)}
    counts = Counter[tuple[int, ...]]()
    for number in range(18):
        choice = Sampler(replace(keys, seed=number), CPU).begin([[0]] * rows)
        counts.update(map(tuple, choice.keep(logits.repeat(rows, 1), range(rows), [drafts] * rows)))
    total, freedom = counts.total(), len(expected) - 1
    assert sum(len(reply) * count for reply, count in counts.items()) > 20_000
    chi = sum((counts[reply] - total * p) ** 2 / (total * p) for reply, p in expected.items())
    assert chi < freedom + 5 * (2 * freedom) ** 0.5  # five deviations of a chi-squared variable
