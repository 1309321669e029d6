"""Modules that mix along tokens are computed row by row, each with the state of its sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.planner.common.outside.cache_name import OLD
from penstock.runtime.kv.batch.row_states import RowByRow
from penstock.runtime.model.rows import Row, RowKind, Step
from tests.runtime.steppers import Alone, unstreamed
from tests.support import save_tiny

WIDTH = 8


class Recurrent(nn.Module):
    """A running mean along the tokens, h = (h + x) / 2, whose state is one vector: as of Mamba or linear attention."""

    def forward(self, hidden: torch.Tensor, past_key_values: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        state = {} if past_key_values is None else past_key_values
        held, out = state.get("held", torch.zeros(WIDTH)), []
        for token in hidden[0]:
            held = (held + token) / 2
            out.append(held)
        state["held"] = held
        return torch.stack(out)[None]


class Convolution(nn.Module):
    """Each token with the two before it, of which the state keeps the last two; answers with a tuple, as mixers do."""

    def forward(self, hidden: torch.Tensor, *, past_key_values: dict[str, torch.Tensor] | None = None) -> tuple[torch.Tensor, None]:
        state = {} if past_key_values is None else past_key_values
        padded = torch.cat([state.get("last", torch.zeros(1, 2, WIDTH)), hidden], 1)
        state["last"] = padded[:, -2:]
        return padded[:, 2:] + 2 * padded[:, 1:-1] + 3 * padded[:, :-2], None


def of(module: nn.Module, hidden: torch.Tensor, **more: object) -> torch.Tensor:
    out = module(hidden, **more)
    return out[0] if isinstance(out, tuple) else out


def row(sequence: int, start: int, count: int) -> Row:
    return Row(sequence, (0,) * count, start, (), RowKind.prompt)


STEPS = [
    Step((row(0, 0, 5), row(1, 0, 1))),
    Step((row(1, 1, 4), row(2, 0, 3), row(0, 5, 1))),
    Step((row(2, 3, 1), row(0, 6, 2))),
]


class Packed:
    """Passes of rows through a module, and what each sequence is to give alone."""

    def __init__(self, module: nn.Module):
        torch.manual_seed(1)
        self.module = module
        self._inputs = {k: torch.randn(1, 8, WIDTH) for k in range(3)}
        self.step = STEPS[0]

    def differs(self) -> list[int]:
        """The passes in which some row is not what its sequence gives alone."""
        alone = {k: of(type(self.module)(), hidden, **{OLD: {}}) for k, hidden in self._inputs.items()}
        found = []
        for number, self.step in enumerate(STEPS):
            hidden = torch.cat([self._inputs[r.sequence][:, r.start : r.end] for r in self.step.rows], 1)
            want = torch.cat([alone[r.sequence][:, r.start : r.end] for r in self.step.rows], 1)
            if not torch.equal(of(self.module, hidden), want):
                found.append(number)
        return found


@pytest.mark.parametrize("kind", [Recurrent, Convolution])
def test_each_row_has_its_own_state(kind: type[nn.Module]) -> None:
    packed = Packed(kind())
    RowByRow(packed.module, lambda: packed.step, dict)
    assert packed.differs() == []


@pytest.mark.parametrize("kind", [Recurrent, Convolution])
def test_without_that_a_packed_pass_mixes_its_rows(kind: type[nn.Module]) -> None:
    assert Packed(kind()).differs() == [0, 1, 2]


def test_a_sequence_that_begins_anew_has_a_fresh_state() -> None:
    packed = Packed(Recurrent())
    RowByRow(packed.module, lambda: packed.step, dict)
    assert packed.differs() == [] and packed.differs() == []


class Forgetful(Recurrent):
    """Goes on from its state by one token alone, as Mamba 1 does."""

    def forward(self, hidden: torch.Tensor, past_key_values: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        if hidden.shape[1] > 1 and past_key_values is not None:
            past_key_values.pop("held", None)
        return super().forward(hidden, past_key_values)


def test_a_module_that_begins_anew_with_several_tokens_is_given_them_one_by_one() -> None:
    packed = Packed(Forgetful())
    RowByRow(packed.module, lambda: packed.step, dict)
    assert packed.differs() == []


def test_a_state_cannot_be_taken_back_or_skipped() -> None:
    module, step = Recurrent(), [STEPS[0]]
    RowByRow(module, lambda: step[0], dict)
    module(torch.zeros(1, 6, WIDTH))
    for start in (4, 6):
        step[0] = Step((row(0, start, 1),))
        with pytest.raises(RuntimeError, match=f"its state has seen 5 tokens, the row begins at {start}"):
            module(torch.zeros(1, 1, WIDTH))


def test_a_sequence_that_has_ended_leaves_its_slot() -> None:
    module, step = Recurrent(), [STEPS[0]]
    states = RowByRow(module, lambda: step[0], dict)
    module(torch.zeros(1, 6, WIDTH))
    states.forget(0)
    step[0] = Step((row(0, 5, 1),))
    with pytest.raises(RuntimeError, match="its state has seen 0 tokens"):
        module(torch.zeros(1, 1, WIDTH))


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "default"])
def test_rotary_frequencies_come_from_a_rows_own_length(tmp_path: Path, kind: str) -> None:
    """A short row beside one that is longer than the model was trained for, and the other way round."""
    half = [1.0 + k / 4 for k in range(8)]
    more = {"dynamic": {"factor": 4.0}, "longrope": {"factor": 4.0, "short_factor": half, "long_factor": [9 * f for f in half]}}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 32} | more.get(kind, {})
    checkpoint = save_tiny(tmp_path, layers=1, max_position_embeddings=32 if kind == "dynamic" else 128, rope_parameters=rope)
    model, reference = (AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval() for _ in range(2))
    assert AutoConfig.from_pretrained(checkpoint).rope_parameters["rope_type"] == kind
    stepper, tokens = unstreamed(model), tuple(k % 300 for k in range(60))
    steps = [
        Step((Row(0, tokens, 0, (0, 1, 2, 3), RowKind.prompt), Row(1, tokens[:9], 0, (4,), RowKind.prompt))),
        Step((Row(1, tokens[9:12], 9, (4,), RowKind.prompt), Row(2, tokens[:40], 0, (5, 6, 7), RowKind.prompt))),
    ]
    alone = {k: Alone(reference) for k in range(3)}
    for step in steps:
        want = torch.cat([alone[r.sequence].run(Step((r,))) for r in step.rows])
        assert torch.allclose(stepper.run(step), want, atol=1e-5)


class Attribute(nn.Module):
    """A running mean whose state lies in the module, as RecurrentGemma's does: one for all sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_state: torch.Tensor | None = None

    def _setup_cache(self) -> None: ...

    def forward(self, hidden: torch.Tensor, **_: object) -> torch.Tensor:
        states = {} if self.mean_state is None else {"held": self.mean_state}
        out = Recurrent()(hidden, states)
        self.mean_state = states["held"]
        return out


def test_a_state_that_lies_in_the_module_is_each_sequences_own() -> None:
    packed = Packed(Attribute())
    assert packed.differs()
    RowByRow(packed.module, lambda: packed.step, dict)
    want = Packed(Recurrent())
    for packed.step in STEPS:
        hidden = torch.cat([packed._inputs[r.sequence][:, r.start : r.end] for r in packed.step.rows], 1)
        alone = {k: Recurrent()(x, {}) for k, x in want._inputs.items()}
        assert torch.equal(packed.module(hidden), torch.cat([alone[r.sequence][:, r.start : r.end] for r in packed.step.rows], 1))
