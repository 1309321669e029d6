"""Steps that ranks record together, on cards that are played: recorded by all or by none, and each says what the whole model says."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import Queue
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.speculation.verify_shapes import VerifyShape
from penstock.runtime.engine.rehearsal import longest_step
from penstock.runtime.engine.stepper import Stepper
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.batch.kv_windows import kinds
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.ranks.dealt_model import DealtModel, EmbeddingElsewhere
from penstock.runtime.ranks.hop import HopMeter
from penstock.runtime.ranks.shared_steps import SharedSteps
from penstock.runtime.recorded.graph_steps import GraphSteps
from penstock.runtime.recorded.recorded_stream import RecordedStream
from penstock.runtime.recorded.shaped_steps import ShapedSteps
from tests.cli import HANGS_S
from tests.runtime.ranks.test_word_ways import Looking, together, ways_of
from tests.runtime.steppers import CPU, PAGE_TOKENS, unstreamed
from tests.runtime.test_recorded_shapes import ByDefinition, Replayed
from tests.support import save_tiny

MOST_TOKENS, SLOTS, VOCAB = 60, 40, 300
SHAPES = [(3, 1), (2, 4)]
"""Rows and tokens of each that are recorded."""


class Mail:
    """``shared_steps.Told`` of ranks in threads."""

    def __init__(self, count: int):
        self.boxes = {(one, other): Queue[dict[str, Any]]() for one in range(count) for other in range(count)}

    def of(self, rank: int) -> Talking:
        return Talking(self, rank)


class Talking:
    def __init__(self, mail: Mail, rank: int):
        self._mail, self.rank = mail, rank

    def tell(self, words: dict[str, Any], count: int | None = None) -> None:
        assert self.rank == 0 and count is not None
        for other in range(1, count):
            self._mail.boxes[0, other].put(words)

    def answer(self, words: dict[str, Any]) -> None:
        self._mail.boxes[self.rank, 0].put(words)

    def hear(self, rank: int = 0) -> dict[str, Any]:
        return self._mail.boxes[rank, self.rank].get(timeout=HANGS_S)


class Card:
    """Memory of which kernels and the host see the same; ``why`` it locks none."""

    def __init__(self, why: str | None = None):
        self._why, self.locked = why, 0

    def lock(self, address: int, nbytes: int) -> str | None:
        self.locked += self._why is None
        return self._why

    def unlock(self, address: int) -> None:
        self.locked -= 1

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return host


class RankGraph(Replayed):
    """A graph of one rank: its hops are those that were there when it was recorded. ``fails`` to record with that."""

    def __init__(self, stepper: Stepper, dealt: DealtModel, shared: SharedSteps, fails: str | None = None):
        super().__init__(stepper)
        self._dealt, self._shared, self._fails = dealt, shared, fails

    @contextmanager
    def recording(self) -> Iterator[None]:
        with super().recording():
            yield  # what is recorded is computed here, unlike on a card: a rank that fails has sent what others wait for
        if self._fails is not None:
            raise RuntimeError(self._fails)
        ways, replay = self._dealt.ways, self.replay

        def again() -> None:
            before, self._dealt.ways = self._dealt.ways, ways
            replay()
            self._dealt.ways = before

        self.replay = again

    def write_word(self, address: int, value: int) -> None:
        self._words.write_word(address, value)

    def wait_word(self, address: int, value: int) -> None:
        self._words.wait_word(address, value)

    @property
    def _words(self) -> Looking:
        assert self._shared._memory is not None
        return Looking(self._shared._memory.bytes)


class Ranks:
    """``count`` ranks in threads over one checkpoint."""

    def __init__(self, checkpoint: Path, count: int, fails: dict[int, str]):
        load = AutoModelForCausalLM.from_pretrained
        whole = load(checkpoint, dtype=torch.float64).eval()
        self.whole, mail = unstreamed(whole, slots=SLOTS), Mail(count)
        dealing, launched = Dealing.even(count, whole.config.num_hidden_layers), ways_of(count, 8 * 64 * VOCAB)
        self.steppers: list[Stepper] = []
        self.steps: list[list[GraphSteps]] = []
        self.shared, self.meters = [], [HopMeter() for _ in range(count)]
        for number in range(count):
            model, rows = load(checkpoint, dtype=torch.float64).eval(), dealing.vocab_rows(number, VOCAB)
            dealt = DealtModel(dealing, number, VOCAB)
            dealt.convert(model)
            dealt.ways = launched[number]
            head = model.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.data[rows.start : rows.stop].clone(), requires_grad=False)
            if number:
                EmbeddingElsewhere().convert(model)
            pool = KvPool(SLOTS, PAGE_TOKENS, kinds(model.config), CPU)
            stepper = Stepper(model, CPU, pool, dealt.begin_pass, kernel=ByDefinition())
            shared = SharedSteps(mail.of(number), count, dealt, self.meters[number], torch.float64)
            steps = []
            for _ in SHAPES:
                graph = cast(Any, RankGraph(stepper, dealt, shared, fails.get(number)))
                stream = RecordedStream((), {}, graph, Ledger())
                fed_by = cast(Any, lambda weights: nullcontext())
                steps.append(GraphSteps(graph, graph, stream, cast(Any, None), fed_by, None, others=shared))
            self.steppers.append(stepper)
            self.steps.append(steps)
            self.shared.append(shared)

    def record(self) -> list[str | None]:
        """What each rank says of the first shape."""

        def rank(number: int) -> Callable[[], None]:
            def compute() -> None:
                why, shapes = self.shared[number].open(Card(), 8 * 8 * VOCAB, None, [])
                assert why is None and not shapes
                for steps, (rows, tokens) in zip(self.steps[number], SHAPES, strict=True):
                    longest_step(self.steppers[number], rows, MOST_TOKENS, steps.capture, tokens)
                if self.steps[number][0].refused is None:
                    self.steppers[number].graphs = ShapedSteps(self.steps[number][0], self.steps[number][1:])

            return compute

        together(*(rank(number) for number in range(len(self.steppers))))
        return [steps[0].refused for steps in self.steps]

    def run(self, step: Step) -> torch.Tensor:
        """What rank 0 says of ``step``."""
        found: dict[int, torch.Tensor] = {}
        together(*(lambda n=n: found.update({n: self.steppers[n].run(step)}) for n in range(len(self.steppers))))
        return found[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), layers=5)


def steps_of(seed: int, sequences: Sequence[KvSequence]) -> Iterator[Step]:
    """A prompt of each, then tokens alone, chains of drafts and another prompt, of some of them."""
    draw = random.Random(seed)
    for sequence in sequences:
        yield Step((sequence.row(len(sequence.tokens), RowKind.prompt),))
        sequence.cached = len(sequence.tokens)
    for number in range(8):
        going, each = draw.sample(list(sequences), draw.randint(1, len(sequences))), 1 if number % 2 else draw.choice([1, 3, 4])
        for sequence in going:
            sequence.tokens += [draw.randrange(VOCAB) for _ in range(each)]
        yield Step(tuple(s.row(each, RowKind.decode if each == 1 else RowKind.verify, each) for s in going), ends=number == 7)
        for sequence in going:
            sequence.cached = len(sequence.tokens)


@pytest.mark.parametrize("count", [2, 3])
def test_recorded_steps_of_ranks_say_what_the_whole_model_says(checkpoint: Path, count: int) -> None:
    ranks = Ranks(checkpoint, count, {})
    assert ranks.record() == [None] * count
    sequences = [KvSequence.of(number, list(range(7 * number + 1, 9 * number + 6))) for number in range(3)]
    for sequence in sequences:
        sequence.hold(ranks.steppers[0].pool.pages, MOST_TOKENS)
    hops = [(meter.received, meter.sent_bytes) for meter in ranks.meters]
    for step in steps_of(count, sequences):
        assert torch.allclose(ranks.run(step), ranks.whole.run(step), atol=1e-9, rtol=0)
    launched = [[steps.steps for steps in each] for each in ranks.steps]
    assert all(each == launched[0] for each in launched) and min(launched[0]) > 0, "all ranks take the same recording"
    for meter, (received, sent) in zip(ranks.meters, hops, strict=True):
        assert meter.received - received >= sum(launched[0]) and meter.sent_bytes > sent, "hops of recorded steps are counted"
    for shared in ranks.shared:
        shared.close()
        shared.close()


def test_a_step_that_one_rank_cannot_record_is_recorded_by_none(checkpoint: Path) -> None:
    ranks = Ranks(checkpoint, 3, {2: "out of memory"})
    assert ranks.record() == ["rank 2: out of memory"] * 3
    assert not any(steps.serves(Step(())) for each in ranks.steps for steps in each)
    sequence = KvSequence.of(0, [3, 4, 5])
    sequence.hold(ranks.steppers[0].pool.pages, MOST_TOKENS)
    step = Step((sequence.row(3, RowKind.prompt),))
    assert torch.allclose(ranks.run(step), ranks.whole.run(step), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("cards", "whys", "said"),
    [
        ([None, None], [None, "engine.graphs=false"], "rank 1: engine.graphs=false"),
        ([None, "CUDA error 2"], [None, None], "rank 1: memory of all ranks: memory that ranks share is not page-locked: CUDA error 2"),
        (["CUDA error 2", None], [None, None], "memory of all ranks: memory that ranks share is not page-locked: CUDA error 2"),
        ([None, None], [None, None], None),
    ],
)
def test_ranks_agree_before_anything_is_recorded(cards: list[str | None], whys: list[str | None], said: str | None) -> None:
    mail, found = Mail(2), {}
    shapes = [VerifyShape(2, 4), VerifyShape(1, 8)], [VerifyShape(1, 8)]
    made = [Card(why) for why in cards]
    shared = [SharedSteps(mail.of(rank), 2, cast(Any, None), HopMeter(), torch.float32) for rank in (0, 1)]

    def rank(n: int) -> None:
        found[n] = shared[n].open(made[n], 100 * (1 - n), whys[n], shapes[n])

    together(lambda: rank(0), lambda: rank(1))
    assert found == {n: (said, [VerifyShape(1, 8)]) for n in (0, 1)}
    assert not any(box.qsize() for box in mail.boxes.values()), "all that was said was heard"
    for one in shared:
        one.close()
    assert [card.locked for card in made] == [0, 0]


def test_a_card_that_waits_for_ranks_that_are_gone_goes_on() -> None:
    mail = Mail(2)
    shared = [
        SharedSteps(mail.of(rank), 2, cast(Any, DealtModel(Dealing((1, 1)), rank, VOCAB)), HopMeter(), torch.float32) for rank in (0, 1)
    ]
    together(lambda: shared[0].open(Card(), 64, None, []), lambda: shared[1].open(Card(), 64, None, []))
    assert shared[0]._memory is not None
    over, into = threading.Event(), torch.zeros(4)

    def alone() -> None:
        dealt = cast(DealtModel, shared[0]._model)
        with shared[0].recording(Looking(shared[0]._memory.bytes)):  # type: ignore[union-attr]
            ways = dealt.ways
            assert ways is not None
            for _ in range(3):
                ways.behind(1).send(into)
                ways.before(1).receive(into)
        over.set()

    thread = threading.Thread(target=alone, daemon=True)
    thread.start()
    time.sleep(0.05)
    assert not over.is_set(), "nobody answers"
    shared[0].let_go()
    assert over.wait(HANGS_S)
    for one in shared:
        one.close()
