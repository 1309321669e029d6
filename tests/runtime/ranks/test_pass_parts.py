"""Passes in parts: rows are cut and nothing is lost, and a layer's weights come once a pass, whatever is computed with them in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.contract.prices.launches import OPERATIONS
from penstock.planner.contract.ranks.rank_parts import TILE_TOKENS, part_lengths, parts_of
from penstock.runtime.asked.sampling_keys import Sampling
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler
from penstock.runtime.hops.hop import HopMeter
from penstock.runtime.hops.torch_hop import Sent, TorchHop
from penstock.runtime.kv.batch.row_parts import own_forward
from penstock.runtime.model.rows import Row, RowKind, Step
from penstock.runtime.ranks.dealt_layer import DealtLayer
from penstock.runtime.ranks.pass_parts import PassParts
from penstock.runtime.store.decoder import decoder_layers
from tests.runtime.fakes import LockingCopier
from tests.runtime.sessions import opened
from tests.runtime.test_launches import Counter
from tests.support import decisions, plan_for

ROWS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=5)


@given(ROWS, st.integers(1, 40))
def test_the_parts_of_a_pass_are_its_rows_in_their_order(rows: list[tuple[int, int, int]], tokens: int) -> None:
    whole = Step(
        tuple(
            Row(number, tuple(range(count)), start, (number,), RowKind.prompt, min(count, wanted))
            for number, (count, start, wanted) in enumerate(rows)
        )
    )
    lengths = part_lengths(whole.tokens, tokens)
    parts = whole.parts(lengths)
    assert [part.tokens for part in parts] == lengths
    assert sum(part.wanted for part in parts) == whole.wanted
    for row in whole.rows:
        own = [cut for part in parts for cut in part.rows if cut.sequence == row.sequence]
        assert [token for cut in own for token in cut.tokens] == list(row.tokens)
        assert [cut.start for cut in own] == [row.start, *(cut.end for cut in own[:-1])] and own[-1].end == row.end


@given(st.integers(1, 5000), st.integers(1, 3000))
def test_parts_are_as_alike_as_whole_tiles_can_be(rows: int, most: int) -> None:
    lengths = part_lengths(rows, most)
    assert sum(lengths) == rows and len(lengths) == parts_of(rows, most) and all(1 <= one <= most for one in lengths)
    assert lengths == sorted(lengths, reverse=True)
    tile = TILE_TOKENS if most >= 2 * TILE_TOKENS and most % TILE_TOKENS == 0 else 1
    assert all(one % tile == 0 for one in lengths[:-1]) and lengths[0] - lengths[-1] < 2 * tile


ONE = (range(5, 45),)
ROUNDED = 2**-6
"""What a rounding of BF16 changes: products of another number of rows sum in another order on some CPUs, and random weights' tokens tie."""
SOME = (range(7, 47), (9, 8, 7), range(100, 111), range(7, 47))


def run(checkpoint: Path, chunk: int, parts: int, prompts: Sequence[Sequence[int]] = ONE) -> tuple[Generation, int]:
    """On a card that is played, all layers streamed, and the units that were copied."""
    plan = plan_for(checkpoint, decisions(gpu=True, batch=len(prompts)), gpu=True)
    batch = Batch(prompts, 3, chunk)
    with opened(plan, checkpoint, LockingCopier()) as session:
        engine = session.engine
        cut = PassParts(parts, engine.stepper.attention, engine.kv, (engine._binder,), engine.stepper.put)
        for layer in decoder_layers(engine.model):
            layer.forward = DealtLayer(own_forward(layer), lambda: None, lambda: cut, before=None, behind=None)
        before = engine.stepper._begin_pass

        def begin_pass(step: Step) -> None:
            before(step)
            cut.begin_pass(step)

        engine.stepper._begin_pass = begin_pass
        sampler = Sampler(Sampling(), session.device)
        session.load(batch, samplers=[sampler])
        made = session.generate(batch, sampler, keep_logits=True)
        return made, engine.card.ring.turns.entered


@pytest.mark.parametrize("parts", [8, 20])
def test_a_unit_that_streams_serves_all_parts_before_it_is_left(checkpoint: Path, parts: int) -> None:
    """Bit-identical to a prompt in chunks, which have as many rows as the parts: both divide the prompt's tokens."""
    want, often = run(checkpoint, parts, 0)
    got, once = run(checkpoint, 1 << 20, parts)
    assert got.tokens == want.tokens and torch.equal(got.logits[0], want.logits[-3])
    passes = -(-40 // parts)
    assert once * (passes + 2) == often * 3, "one pass in parts, or so many passes, and two steps"


def test_parts_of_unequal_prompts_are_those_prompts(checkpoint: Path) -> None:
    want, got, alone = (run(checkpoint, 1 << 20, tokens, SOME)[0] for tokens in (0, 7, 1))
    most, next_one = want.logits[0].topk(2).values.unbind(-1)
    clear = (most - next_one > 2 * ROUNDED).tolist()
    assert any(clear), "else no token would be compared"
    for made in (got, alone):
        torch.testing.assert_close(made.logits[0], want.logits[0], atol=ROUNDED, rtol=0, msg="a rounding of BF16")
        firsts = [(own[0], others[0]) for own, others in zip(made.tokens, want.tokens, strict=True)]
        assert all(own == other for (own, other), sure in zip(firsts, clear, strict=True) if sure)


class CountedWays:
    """Hops that go nowhere, of a rank with a neighbour on both sides."""

    def __init__(self) -> None:
        self._hop = TorchHop(None, 0, HopMeter(), Sent())

    def before(self, peer: int) -> TorchHop:
        return self._hop

    behind = of = before

    def expect(self, parts: int) -> None: ...


OWN_PART = 8
"""Operations of a layer's part that reach a dispatcher here."""


class Cuts(PassParts):
    def __init__(self, parts: int, tokens: int):
        self._given = []
        self.bounds = list(pairwise(accumulate([tokens // parts] * parts, initial=0)))

    def turns(self) -> Iterator[None]:
        yield from (None for _ in self.bounds)


def test_a_part_has_the_operations_that_predictions_count_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what NCCL's two calls take, which reach no dispatcher here."""
    for name in ("irecv", "isend"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    hidden, cos = torch.zeros(1, 64, 8), torch.zeros(1, 64, 4)
    counts = []
    for parts in (2, 8):
        cuts = Cuts(parts, 64)
        layer = DealtLayer(lambda hidden, **_: hidden.clone(), CountedWays, lambda cuts=cuts: cuts, before=0, behind=0)
        given = {"position_ids": cos[..., 0], "position_embeddings": (cos, cos)}
        layer(hidden, **given)  # the first layer of a pass cuts what all are given
        with Counter() as counter:
            layer(hidden, **given)
        counts.append(counter.calls)
    each = (counts[1] - counts[0]) / 6 - 1
    assert each == pytest.approx(OWN_PART, abs=1) and each < OPERATIONS.part
