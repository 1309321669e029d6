"""A prompt's layers recorded around attention say what launched ones say, of as many tokens and of fewer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.ranks.dealt_layer import DealtLayer
from penstock.runtime.recorded.prompts.prompt_layers import PromptLayers
from penstock.runtime.recorded.prompts.token_tensors import Arguments, TokenTensors
from penstock.runtime.store.decoder import decoder_layers
from tests.runtime.ranks.played_graphs import Pieces
from tests.runtime.sessions import opened
from tests.support import HostCopier, decisions, plan_for, save_tiny

CPU = torch.device("cpu")


def _no_ways() -> Any:
    raise AssertionError("nothing hops")


@pytest.mark.parametrize(
    "model_type, dealt", [("llama", False), ("llama", True), ("qwen3", False), ("gemma3_text", False), ("gpt2", False)]
)
def test_recorded_layers_say_what_launched_ones_say(tmp_path: Path, model_type: str, dealt: bool) -> None:
    """``dealt``: something stands between each layer and those beside it, as between ranks."""
    checkpoint = save_tiny(tmp_path, model_type)
    plan = plan_for(checkpoint, decisions(gpu=True, resident=(6, 6, 1), embedding=Tier.vram, cap=0, hwm=3, distance=0), gpu=True)
    with opened(plan, checkpoint, HostCopier(), CPU) as session:
        session.load(Batch([[5] * 40], 4, 1 << 20))
        stepper, pages = session.engine.stepper, session.engine.kv.pages
        for layer in decoder_layers(session.engine.model) if dealt else ():
            layer.forward = DealtLayer(layer.forward, _no_ways, lambda: None, None, None)
        sequence = KvSequence.of(0, [1 + n % 200 for n in range(40)])
        sequence.hold(pages, 40)

        def step(tokens: int, behind: int) -> Step:
            sequence.cached = behind
            return Step((sequence.row(tokens, RowKind.prompt),))

        steps = [step(*at) for at in ((16, 0), (9, 0), (13, 9), (16, 3), (8, 0), (17, 0))]
        wanted = [stepper.run(one).clone() for one in steps]
        prompts = PromptLayers(decoder_layers(session.engine.model), stepper.attention, Pieces(CPU))
        before = stepper._begin_pass

        def begin_pass(one: Step) -> None:
            prompts.begin_pass(one)
            before(one)

        stepper._begin_pass = begin_pass
        prompts.record(partial(stepper.run, step(16, 0)))
        assert prompts.refused is None and prompts.tokens == 16
        for one, said in zip(steps, wanted, strict=True):
            launched = prompts.launched
            got = stepper.run(one)
            serves = 8 < one.tokens <= 16
            assert prompts.launched == launched + 6 * serves
            if one.tokens == 16 or not serves:
                assert torch.equal(got, said)
            else:  # more rows are multiplied in another order
                assert torch.allclose(got.float(), said.float(), atol=0.02 * said.abs().max().item(), rtol=0), one.tokens
        sequence.cached = 19
        decode = Step((sequence.row(1, RowKind.decode),))
        launched = prompts.launched
        stepper.run(decode)
        assert prompts.launched == launched, "steps are none of its business"
        prompts.stop()
        again = stepper.run(steps[0])
        assert torch.equal(again, wanted[0])


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_rows_of_any_kinds_are_computed_in_recorded_passes(tmp_path: Path, model_type: str) -> None:
    """Prompts behind others of theirs, several in a pass, beside tokens that are decoded: what lies where is attention's alone."""
    checkpoint, draw = save_tiny(tmp_path, model_type), Random(7)
    plan = plan_for(checkpoint, decisions(gpu=True, resident=(6, 6, 1), embedding=Tier.vram, cap=0, hwm=3, distance=0), gpu=True)
    with opened(plan, checkpoint, HostCopier(), CPU) as session:
        session.load(Batch([[5] * 40], 4, 1 << 20))
        stepper, pages = session.engine.stepper, session.engine.kv.pages
        rows = [KvSequence.of(number, [1 + (7 * n + number) % 200 for n in range(40)]) for number in range(3)]
        for sequence in rows:
            sequence.hold(pages, 40)
        prompts = PromptLayers(decoder_layers(session.engine.model), stepper.attention, Pieces(CPU))
        prompts.record(partial(stepper.run, Step((rows[0].row(16, RowKind.prompt),))))
        for _ in range(12):
            counts = [draw.choice((0, 1, draw.randrange(2, 9))) for _ in rows]
            kinds = [RowKind.decode if count == 1 else RowKind.prompt for count in counts]
            for sequence, count in zip(rows, counts, strict=True):
                sequence.cached = 0 if sequence.cached + count > 40 else sequence.cached
            step = Step(tuple(one.row(n, kind, n) for one, n, kind in zip(rows, counts, kinds, strict=True) if n))
            if not step.rows:
                continue
            wanted, launched = stepper.run(step).float(), prompts.launched
            prompts.begin_pass(step)
            said = stepper.run(step).float()
            prompts.begin_pass(Step(()))
            assert prompts.launched == launched + 6 * (8 < step.tokens <= 16 and step.has_prompt)
            assert torch.allclose(said, wanted, atol=0.02 * wanted.abs().max().item(), rtol=0)
            for sequence, count in zip(rows, counts, strict=True):
                sequence.cached += count
        assert prompts.launched >= 3 * 6, "some passes had as many tokens"


def test_tensors_of_tokens_are_found_wherever_they_lie_and_others_are_left() -> None:
    scales, rotations, positions, lines = (torch.rand(*size) for size in ((3,), (1, 5, 4), (5,), (1, 5)))
    given = Arguments((None, rotations), {"deep": ({"of": positions}, 7), "scales": scales, "lines": lines})
    found = TokenTensors(given, 5)
    assert all(one is other for one, other in zip(found.of(given), (rotations, positions, lines), strict=True))
    assert found.are_those_of(given) and not found.are_those_of(Arguments((), given.named))
    assert not found.are_those_of(Arguments((None, rotations[..., :2]), given.named))
    ours = [torch.zeros_like(one) for one in found.of(given)]
    rest, named = found.replaced(given, ours)
    assert rest[0] is None and rest[1] is ours[0] and named["deep"][0]["of"] is ours[1] and named["deep"][1] == 7
    assert named["scales"] is scales and named["lines"] is ours[2] and given.named["lines"] is lines
