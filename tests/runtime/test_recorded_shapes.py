"""A recorded step serves rows of fewer tokens than it has, and fewer rows: each says what it says alone, and writes no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.runtime.engine.passes.rehearsal import longest_step
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.attention.page_tables import PageTables, Traits
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.batch.kv_windows import kinds
from penstock.runtime.kv.batch.token_shape import Pair, TokenShape
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.recorded.graph_steps import GraphSteps
from penstock.runtime.recorded.recorded_stream import RecordedStream
from penstock.runtime.recorded.shaped_steps import ShapedSteps
from tests.runtime.captures import Capturing
from tests.runtime.steppers import CPU, PAGE_TOKENS, unstreamed
from tests.runtime.test_slot_turns import PlayedGraph
from tests.support import save_tiny

MOST_TOKENS, SLOTS, VOCAB = 60, 40, 300
SHAPES = [(3, 1), (3, 4), (1, 9)]
"""Rows and tokens of each that are recorded."""


class ByDefinition:
    """Attention over page tables, read from the tables alone."""

    alone = False

    def takes(self, query: torch.Tensor, shape: TokenShape) -> bool:
        return True

    def attend(self, query: torch.Tensor, held: Pair, tables: PageTables, traits: Traits, out: torch.Tensor) -> None:
        group = query.shape[1] // held[0].shape[1]
        each = zip(tables.firsts.tolist(), tables.starts.tolist(), tables.counts.tolist(), tables.ends.tolist(), tables.pages, strict=True)
        for first, start, count, end, pages in each:
            for token in range(count):
                last = min(start + token, end - 1)
                seen = torch.arange(max(0, last + 1 - (traits.window or last + 1)), last + 1)
                slots = pages[seen // tables.page_tokens] * tables.page_tokens + seen % tables.page_tokens
                keys, values = (states[slots].repeat_interleave(group, 1) for states in held)
                weights = (torch.einsum("hd,nhd->hn", query[first + token], keys) * traits.scaling).softmax(-1)
                out[first + token] = torch.einsum("hn,nhd->hd", weights, values)

    def write(self, held: Pair, new: Pair, slots: torch.Tensor) -> bool:
        return False


class Replayed(Capturing, PlayedGraph):
    """A graph of kernels alone: a launch computes again what was computed while it was recorded, from the same places into the same."""

    def __init__(self, stepper: Stepper):
        self._stepper = stepper
        self.replay: Callable[[], object] = lambda: None

    def compute_tabled(self, *given: Any) -> torch.Tensor:
        logits = self._stepper.compute_tabled(*given)
        if self.captures:
            self.replay = lambda: logits.copy_(self._stepper.compute_tabled(*given))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def launch(self) -> None:
        self.replay()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[PreTrainedModel, PreTrainedModel]]:
    """In float64, where passes of other shapes say the same; each twice, since it attends by one stepper. One has windows."""
    where: Path = tmp_path_factory.mktemp("models")
    paths = [save_tiny(where / name, name, layers=2) for name in ("llama", "mistral")]
    load = AutoModelForCausalLM.from_pretrained
    return [(load(path, dtype=torch.float64).eval(), load(path, dtype=torch.float64).eval()) for path in paths]


def recorded(model: PreTrainedModel) -> tuple[Stepper, ShapedSteps, list[GraphSteps]]:
    stepper = Stepper(model, CPU, KvPool(SLOTS, PAGE_TOKENS, kinds(model.config), CPU), kernel=ByDefinition())
    shapes = []
    for rows, tokens in SHAPES:
        graph = cast(Any, Replayed(stepper))
        stream = RecordedStream((), {}, graph, Ledger())
        steps = GraphSteps(graph, graph, stream, cast(Any, None), cast(Any, lambda weights: nullcontext()), None)
        longest_step(stepper, rows, MOST_TOKENS, steps.capture, tokens)
        assert steps.refused is None
        shapes.append(steps)
    return stepper, ShapedSteps(shapes[0], shapes[1:]), shapes


def lying(stepper: Stepper) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in stepper.pool.buffers().values()]


@given(data=st.data())
@settings(deadline=None, max_examples=10)
def test_rows_of_a_recorded_shape_say_what_they_say_alone(
    models: list[tuple[PreTrainedModel, PreTrainedModel]], data: st.DataObject
) -> None:
    model, other = models[data.draw(st.integers(0, len(models) - 1))]
    stepper, shaped, shapes = recorded(model)
    plain = unstreamed(other, slots=SLOTS)
    sequences: list[tuple[KvSequence, KvSequence]] = []
    for number in range(data.draw(st.integers(1, 3))):
        prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
        both = KvSequence.of(number, prompt), KvSequence.of(number, prompt)
        for sequence, steps in zip(both, (stepper, plain), strict=True):
            sequence.hold(steps.pool.pages, MOST_TOKENS)
            steps.run(Step((sequence.row(len(prompt), RowKind.prompt),)))
            sequence.cached = len(prompt)
        sequences.append(both)
    for _ in range(4):
        going = data.draw(st.lists(st.sampled_from(sequences), min_size=1, unique_by=id))
        chains = [data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)) for _ in going]
        wanted = [data.draw(st.integers(1, len(chain))) for chain in chains]
        steps = []
        for side in (0, 1):
            rows = []
            for both, chain, count in zip(going, chains, wanted, strict=True):
                both[side].tokens[both[side].cached :] = chain
                rows.append(both[side].row(len(chain), RowKind.decode if len(chain) == 1 else RowKind.verify, count))
            steps.append(Step(tuple(rows)))
        before, want = lying(stepper), plain.run(steps[1])
        longest = max(map(len, chains))
        assert shaped.serves(steps[0]) == any(len(going) <= rows and longest <= tokens for rows, tokens in SHAPES)
        launched = [shape.steps for shape in shapes]
        if shaped.serves(steps[0]):
            found = shaped.run(steps[0])
            taken = next(k for k, (was, shape) in enumerate(zip(launched, shapes, strict=True)) if shape.steps > was)
            fitting = [rows * tokens for rows, tokens in SHAPES if len(going) <= rows and longest <= tokens]
            assert SHAPES[taken][0] * SHAPES[taken][1] == min(fitting), "a larger shape than it takes"
        else:
            found = stepper.run(steps[0])
        assert torch.allclose(found, want, atol=1e-9, rtol=0)
        assert unchanged(stepper, before, steps[0]), "a token was written that no row has"
        for both, chain in zip(going, chains, strict=True):
            kept = data.draw(st.integers(1, len(chain)))
            for sequence in both:
                sequence.cached += kept
                del sequence.tokens[sequence.cached :]
        if any(sequence.cached > MOST_TOKENS - 10 for sequence, _ in sequences):
            break


def unchanged(stepper: Stepper, before: Sequence[torch.Tensor], step: Step) -> bool:
    """All that ``step`` does not write."""
    slots = {row.pages[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS for row in step.rows for t in range(row.start, row.end)}
    others = torch.tensor(sorted(set(range(SLOTS * PAGE_TOKENS)) - slots))
    each = zip(before, lying(stepper), strict=True)
    return all(torch.equal(was.view(SLOTS * PAGE_TOKENS, -1)[others], now.view(SLOTS * PAGE_TOKENS, -1)[others]) for was, now in each)
