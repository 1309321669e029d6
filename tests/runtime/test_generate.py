"""Prefill, sampling and stopping, held against transformers and against each other."""

from __future__ import annotations

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

from penstock.planner.common.errors import UserError
from penstock.runtime.engine.passes.generate import Batch, Generation, generate, shares
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from tests.runtime.steppers import unstreamed
from tests.support import save_tiny

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 200, 31, 7, 80, 81, 82, 83], [17, 250], [40]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """In float32: passes of other shapes then differ by rounding alone, far below the gaps between logits. Computed by transformers."""
    checkpoint: Path = save_tiny(tmp_path_factory.mktemp("model"), layers=3)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(alone: nn.Module) -> nn.Module:
    """The same, computed in steps."""
    return deepcopy(alone)


def batch(prompts: list[list[int]] = PROMPTS, new: int = 6, chunk: int = 1 << 20, stop: frozenset[int] = frozenset()) -> Batch:
    return Batch(prompts, new, chunk_tokens=chunk, stop_ids=stop)


def run(model: nn.Module, of: Batch, sampling: Sampling | None = None, **options) -> Generation:
    return generate(unstreamed(model), of, Sampler(sampling or Sampling(), CPU), keep_logits=True, **options)


def test_a_batch_says_what_each_prompt_says_alone(model: nn.Module, alone: nn.Module) -> None:
    together = run(model, batch())
    assert together.tokens == [run(model, batch([p])).tokens[0] for p in PROMPTS]
    whole = [alone.generate(torch.tensor([p]), max_new_tokens=6, do_sample=False)[0].tolist() for p in PROMPTS]
    assert [p + said for p, said in zip(PROMPTS, together.tokens, strict=True)] == whole


def test_no_text_is_made_of_logits_that_are_no_numbers(alone: nn.Module) -> None:
    model = deepcopy(alone)
    model.get_parameter("lm_head.weight").data[7, 3] = torch.nan
    with pytest.raises(UserError, match=r"the logits of prompt 1 are not numbers \(NaN\), so there is no text"):
        run(model, batch())


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 9])
def test_prefill_in_chunks_is_prefill_at_once(model: nn.Module, chunk: int) -> None:
    """Also where a pass has nothing for the shorter prompts."""
    whole, cut = run(model, batch()), run(model, batch(chunk=chunk))
    assert cut.tokens == whole.tokens
    for number in range(len(PROMPTS)):
        for a, b in zip(of_sequence(cut, number), of_sequence(whole, number), strict=True):
            assert torch.allclose(a, b, atol=1e-4)


def of_sequence(made: Generation, number: int) -> list[torch.Tensor]:
    """Its logits [vocab], pass by pass."""
    rows = (zip((row.sequence for row in each.step.rows if row.wanted), each.logits, strict=True) for each in made.passes)
    return [logits for each in rows for sequence, logits in each if sequence == number]


@pytest.mark.parametrize("chunk", [16, 40, 4096])
def test_unequal_prompts_cost_their_own_tokens(model: nn.Module, chunk: int) -> None:
    prompts = [list(range(16)), [k % 300 for k in range(2048)]]
    made = run(model, batch(prompts, new=1, chunk=chunk))
    assert sum(each.step.tokens for each in made.passes) == 16 + 2048
    assert len(made.passes) == -(-(16 + 2048) // (2 * chunk)), "a pass has fewer tokens than it may"


@settings(max_examples=200)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 80))
def test_a_pass_is_shared_so_that_no_token_of_it_is_idle(left: list[int], tokens: int) -> None:
    parts = shares(left, tokens)
    assert all(0 <= n <= has for n, has in zip(parts, left, strict=True))
    assert sum(parts) <= max(tokens, 1) and (any(parts) or not any(left))
    assert sum(parts) > min(sum(left), tokens) - len(left)
    cut = [n for n, has in zip(parts, left, strict=True) if n < has]
    assert all(n <= min(cut) + 1 for n in parts) if cut else True


def test_a_sequence_that_has_ended_is_computed_no_more(model: nn.Module) -> None:
    made = run(model, replace(batch(new=8), limits=[2, 8, 4]))
    assert [[row.sequence for row in each.step.rows] for each in made.passes[1:]] == [[0, 1, 2], [1, 2], [1, 2], [1], [1], [1], [1]]


def test_all_pages_are_free_when_a_batch_is_over_or_broken_off(model: nn.Module) -> None:
    stepper = unstreamed(model)
    generate(stepper, batch(), Sampler(Sampling(), CPU))
    assert stepper.pool.pages.free == stepper.pool.pages.slots

    def broken(*_: object) -> None:
        assert stepper.pool.pages.free < stepper.pool.pages.slots
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(stepper, batch(), Sampler(Sampling(), CPU), progress=broken)
    assert stepper.pool.pages.free == stepper.pool.pages.slots


def test_a_stop_token_ends_its_own_sequence_and_is_left_out(model: nn.Module) -> None:
    free = run(model, batch(new=8)).tokens
    stop = free[0][3]
    ended = run(model, batch(new=8, stop=frozenset({stop}))).tokens
    assert ended[0] == free[0][: free[0].index(stop)]
    assert ended[1:] == [t[: t.index(stop)] if stop in t else t for t in free[1:]]


def test_generation_ends_when_every_sequence_has(model: nn.Module) -> None:
    free = run(model, batch([PROMPTS[0]], new=8)).tokens[0]
    ended = run(model, batch([PROMPTS[0]], new=8, stop=frozenset({free[2]})))
    assert len(ended.step_s) == free.index(free[2]) and len(ended.logits) == len(ended.step_s) + 1
    assert run(model, batch([PROMPTS[0]], new=1)).step_s == []


def test_what_was_said_so_far_may_end_a_sequence(model: nn.Module) -> None:
    free = run(model, batch(new=8)).tokens
    ended = run(model, batch(new=8), finished=lambda tokens: [len(tokens[0]) >= 3, False, len(tokens[2]) >= 5]).tokens
    assert ended == [free[0][:3], free[1], free[2][:5]]


def test_progress_counts_prompt_tokens_and_steps(model: nn.Module) -> None:
    seen: list[tuple[str, int, int]] = []
    run(model, batch(new=3, chunk=4), progress=lambda *at: seen.append(at))
    assert seen == [("prefill", 12, 12), ("decode", 1, 3), ("decode", 2, 3), ("decode", 3, 3)]


def test_the_same_seed_repeats_itself_and_another_does_not(model: nn.Module) -> None:
    def sampled(seed: int) -> list[list[int]]:
        return run(model, batch(new=12), Sampling(temperature=2.0, top_p=0.95, seed=seed)).tokens

    assert sampled(7) == sampled(7) != sampled(8)


LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]))


def drawn(temperature: float, top_p: float, logits: torch.Tensor = LOGITS, times: int = 4000) -> torch.Tensor:
    """Shares [batch, vocab] of tokens over many draws."""
    choose = Sampler(Sampling(temperature, top_p, seed=1), CPU).begin([[0]] * len(logits))
    counts = torch.zeros_like(logits)
    for _ in range(times):
        counts[torch.arange(len(logits)), choose(logits, range(len(logits)))] += 1
    return counts / times


def test_sampling_draws_by_probability_at_its_temperature() -> None:
    assert torch.allclose(drawn(1.0, 1.0), LOGITS.exp(), atol=0.03)
    assert torch.allclose(drawn(2.0, 1.0), torch.softmax(LOGITS / 2, -1), atol=0.03)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_warming_up_changes_nothing_that_is_drawn(top_p: float) -> None:
    draws = []
    for warm in (False, True):
        sampler = Sampler(Sampling(1.0, top_p, seed=1, repetition_penalty=1.1), CPU)
        if warm:
            sampler.warm_up(torch.zeros_like(LOGITS))
        choose = sampler.begin([[0], [0]])
        draws.append([choose(LOGITS, [0, 1]).tolist() for _ in range(20)])
    assert draws[0] == draws[1]


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4)])
def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it(top_p: float, kept: int) -> None:
    assert ((drawn(1.0, top_p, times=600) > 0).sum(-1) == kept).all()


def test_a_sequence_ends_at_its_own_limit_and_the_batch_when_all_have(model: nn.Module) -> None:
    free = run(model, batch(new=8)).tokens
    limited = run(model, replace(batch(new=8), limits=[2, 5, 1]))
    assert limited.tokens == [free[0][:2], free[1][:5], free[2][:1]]
    assert len(limited.step_s) == 4


class Kept:
    """A prefix cache that restores nothing and remembers what it was told to keep."""

    def __init__(self) -> None:
        self.kept: list[list[tuple[int, list[int]]]] = []

    def restore(self, sequences: Sequence[KvSequence]) -> None:
        pass

    def confirm(self) -> None:
        pass

    def keep(self, sequences: Sequence[KvSequence]) -> None:
        self.kept.append([(s.number, s.tokens[: s.cached]) for s in sequences])

    def advance(self) -> None:
        pass

    def finish(self) -> None:
        pass


def test_at_the_end_replies_are_kept_as_far_as_they_were_fed(model: nn.Module) -> None:
    of, kept = replace(batch(new=4), keep_replies=[True, False, True], limits=[4, 4, 1]), Kept()
    said = generate(unstreamed(model), of, Sampler(Sampling(), CPU), kept).tokens
    assert kept.kept == [list(enumerate(PROMPTS)), [(0, PROMPTS[0] + said[0][:3]), (2, PROMPTS[2])]]


class Restored(Kept):
    """Restores ``tokens`` of the first sequence, wrongly, and says so when it is asked."""

    def __init__(self, stepper: Stepper, tokens: int):
        super().__init__()
        self._stepper, self._tokens = stepper, tokens

    def restore(self, sequences: Sequence[KvSequence]) -> None:
        self._first = sequences[0]
        self._first.hold(self._stepper.pool.pages, self._tokens)
        self._first.cached = self._tokens
        for buffer in self._stepper.pool.buffers().values():
            buffer.zero_()

    def confirm(self) -> None:
        self._first.cached = 0


def test_what_was_restored_wrongly_is_computed_once_more(model: nn.Module) -> None:
    of = batch([[k % 300 for k in range(40)], PROMPTS[1]])
    stepper = unstreamed(model)
    want = generate(stepper, of, Sampler(Sampling(), CPU)).tokens
    assert generate(stepper, of, Sampler(Sampling(), CPU), Restored(stepper, 16)).tokens == want
