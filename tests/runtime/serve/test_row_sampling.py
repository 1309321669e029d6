"""Rows that are chosen together are chosen as transformers' own warpers and penalties choose each alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from penstock.runtime.asked.sampling_keys import Sampling
from penstock.runtime.engine.passes.sampling import Sampler, _warpers
from penstock.runtime.engine.passes.step_inputs import CopiedInputs
from penstock.runtime.serve.motor.row_choice import RowChoice, Told
from penstock.runtime.serve.motor.row_sampling import RowSampler
from tests.runtime.sessions import CPU
from tests.runtime.speculate.two_drafts import DRAFTS, LOGITS, TEMPERATURE, TOP_K, hold_to_the_model

PUT = CopiedInputs(CPU).put
SAMPLER = RowSampler(PUT, drawn_rows=2, block_rows=3)
VOCAB, GRID = 60, 1000
WARPED = [
    {},
    {"temperature": 0.4},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1, "temperature": 1.7},
    {"top_k": 20, "top_p": 0.6, "min_p": 0.05, "temperature": 1.3},
    {"typical_p": 0.7},
]


class Given(RowChoice):
    """Draws ``chance`` in place of its own."""

    def __init__(self, sampling: Sampling, chance: float):
        super().__init__(sampling, Told(), [1], 0, PUT)
        self.given = chance

    def chance(self, ahead: int) -> float:
        return self.given


def test_every_row_draws_from_the_distribution_that_transformers_warps() -> None:
    torch.manual_seed(0)
    samplings = [Sampling(**{"temperature": 1.0} | keys) for keys in WARPED]
    logits = torch.randn(len(samplings), VOCAB) * 2
    counts = torch.zeros(len(samplings), VOCAB)
    for cell in range(GRID):
        picked = SAMPLER.choose(logits, [Given(s, (cell + 0.5) / GRID) for s in samplings])
        for row, pick in enumerate(picked):
            counts[row, pick.token] += 1
    for row, sampling in enumerate(samplings):
        scores = logits[row : row + 1]
        for warper in _warpers(sampling):
            scores = warper(None, scores)
        want = torch.softmax(scores, -1)[0]
        assert (counts[row] / GRID - want).abs().max() < 2 / GRID, WARPED[row]
        assert not counts[row][want == 0].any()


@pytest.mark.parametrize(
    "keys",
    [
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 3.0, "repetition_penalty": 1.2},
        {"no_repeat_ngram": 2},
    ],
)
def test_penalties_are_those_of_a_run(keys: dict[str, Any]) -> None:
    torch.manual_seed(1)
    sampling, prompts = Sampling(**keys), [[3, 4, 3], [5]]
    logits = torch.randn(40, 3, VOCAB) * 3 + torch.randn(VOCAB) * 3
    choice = Sampler(sampling, CPU).begin(prompts)
    rows = [*(RowChoice(sampling, Told(), prompt, 0, PUT) for prompt in prompts), RowChoice(Sampling(), Told(), [1], 0, PUT)]
    want, got = [], []
    for step in logits:
        want.append([*choice(step[:2], [0, 1]).tolist(), int(step[2].argmax())])
        got.append([pick.token for pick in SAMPLER.choose(step, rows)])
    assert got == want and want != logits.argmax(-1).tolist()


def test_bias_and_least_length_change_their_own_row_alone() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 9], logits[:, 8] = 2.0, 1.0
    told: Sequence[Told] = [Told(), Told(bias={5: 3.0}), Told(frozenset({9}), min_tokens=2), Told(bias={9: -100.0})]
    rows = [RowChoice(Sampling(), each, [1], 0, PUT) for each in told]
    said = [[pick.token for pick in SAMPLER.choose(logits, rows)] for _ in range(3)]
    assert said == [[9, 5, 8, 8], [9, 5, 8, 8], [9, 5, 9, 8]]


def test_rows_that_are_no_numbers_are_found_whatever_is_asked_of_them() -> None:
    logits = torch.randn(5, VOCAB)
    logits[1, 3] = logits[2, 7] = logits[3] = torch.nan
    keys = [Sampling(), Sampling(), Sampling(1.0, top_p=0.9), Sampling(repetition_penalty=2.0), Sampling(1.0)]
    picked = SAMPLER.choose(logits, [RowChoice(s, Told(logprobs=1), [1], 0, PUT) for s in keys])
    assert [pick.token is None for pick in picked] == [False, True, True, True, False]


def test_a_row_draws_the_same_in_any_company() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 3, VOCAB)
    hot, other = Sampling(1.4, top_k=30), Sampling(0.7, top_p=0.5)

    def said(rows: Sequence[int], samplings: Sequence[Sampling]) -> list[int | None]:
        choices = [RowChoice(s, Told(), [1], 77 + k, PUT) for k, s in zip(rows, samplings, strict=True)]
        return [SAMPLER.choose(step[list(rows)], choices)[0].token for step in logits]

    assert said([0], [hot]) == said([0, 1], [hot, Sampling()]) == said([0, 1, 2], [hot, other, hot])


def test_all_places_of_a_chain_say_what_they_say_one_after_the_other() -> None:
    """Drawn, penalised, biased and held back, with unequal chains, some kept whole and some not at all."""
    torch.manual_seed(3)
    draw = random.Random(3)
    keys = [
        Sampling(),
        Sampling(1.2, top_k=9),
        Sampling(0.8, top_p=0.7, repetition_penalty=1.5),
        Sampling(1.0, frequency_penalty=0.8, presence_penalty=0.4),
        Sampling(repetition_penalty=1.3, no_repeat_ngram=2),
    ]
    told = [Told(), Told(logprobs=2), Told(bias={3: 1.5}), Told(frozenset({1, 2}), min_tokens=30), Told(logprobs=1)]
    at_once, in_turn = ([RowChoice(s, t, [4, 5], 7 + k, PUT) for k, (s, t) in enumerate(zip(keys, told, strict=True))] for _ in range(2))
    kept = 0
    for _ in range(40):
        each = [torch.randn(1 + draw.randrange(5), 12) * 2 for _ in keys]
        drafts, want = [], []
        for choice, logits in zip(in_turn, each, strict=True):
            said, draft = SAMPLER.choose(logits[:1], [choice]), list[int]()
            for row in logits[1:]:
                right = draw.random() < 0.7
                draft.append(((said[-1].token or 0) + (not right)) % 12)
                if not right:
                    break
                said += SAMPLER.choose(row[None], [choice])
            drafts.append([*draft, *(draw.randrange(12) for _ in range(len(logits) - 1 - len(draft)))])
            want.append(said)
        ends = list(accumulate((len(logits) for logits in each), initial=0))
        rows = [range(first, end) for first, end in pairwise(ends)]
        got = SAMPLER.pick(SAMPLER.read(torch.cat(each)), rows, at_once, drafts)
        assert [[pick.token for pick in run] for run in got] == [[pick.token for pick in run] for run in want]
        assert [[pick.logprobs is None for pick in run] for run in got] == [[pick.logprobs is None for pick in run] for run in want]
        kept += sum(len(run) - 1 for run in got)
    assert kept > 80


def test_drawn_rows_of_a_server_have_the_distribution_of_the_model() -> None:
    """100,000 draws: each reply to two drafts, which are kept or not, as often as its probability says."""
    rows = 2000
    choices = [RowChoice(Sampling(TEMPERATURE, top_k=TOP_K), Told(), [1], seed, PUT) for seed in range(rows)]
    places, read = [range(3 * row, 3 * row + 3) for row in range(rows)], SAMPLER.read(LOGITS.repeat(rows, 1))
    hold_to_the_model(lambda: [tuple(pick.token for pick in run) for run in SAMPLER.pick(read, places, choices, [DRAFTS] * rows)])
