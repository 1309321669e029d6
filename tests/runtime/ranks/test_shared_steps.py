"""Steps that ranks record together, on cards that are played: recorded by all or by none, and each says what the whole model says."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.speculation.verify_shapes import VerifyShape
from penstock.runtime.beside.host_ffn import HostFfn
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.engine.passes.rehearsal import longest_step
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.hops.hop import HopMeter
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.batch.kv_windows import kinds
from penstock.runtime.model.binding import WeightStream
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.ranks.dealt_model import DealtModel, EmbeddingElsewhere
from penstock.runtime.ranks.shared_steps import Agreed, SharedSteps
from penstock.runtime.recorded.graph_steps import GraphSteps
from penstock.runtime.recorded.host_steps import HostSteps, HostUnit, host_unit
from penstock.runtime.recorded.recorded_stream import RecordedStream
from penstock.runtime.recorded.shaped_steps import ShapedSteps
from penstock.runtime.store.decoder import decoder_layers
from tests.cli import HANGS_S
from tests.runtime.ranks.test_word_ways import Looking, together, ways_of
from tests.runtime.steppers import CPU, PAGE_TOKENS, unstreamed
from tests.runtime.test_recorded_shapes import ByDefinition, Replayed
from tests.support import HostCopier, save_tiny

MOST_TOKENS, SLOTS, VOCAB = 60, 40, 300
FFN_BYTES = 3 * 64 * 160 * 2
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


class Fed:
    """In place of a binder: whatever feeds a rank's passes hears when a layer's attention begins."""

    def __init__(self, model: nn.Module):
        self._stream: WeightStream | None = None
        for number, layer in enumerate(decoder_layers(cast(Any, model))):
            layer.self_attn.register_forward_pre_hook(partial(self._enter, Unit("attn", number)))

    def _enter(self, unit: Unit, *_: object) -> None:
        if self._stream is not None:
            self._stream.enter(unit)

    @contextmanager
    def by(self, stream: WeightStream | None) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before


class RankGraph(Replayed):
    """A graph of one rank: its hops, and its units of the ``host``, are those that were there when it was recorded. ``fails``: what
    recording it raises."""

    def __init__(self, stepper: Stepper, dealt: DealtModel, fed: Fed, fails: str | None = None):
        super().__init__(stepper)
        self._dealt, self._fed, self._fails = dealt, fed, fails
        self.host: HostSteps | None = None
        self.stream: RecordedStream

    @contextmanager
    def recording(self) -> Iterator[None]:
        if self.host is not None:  # what is recorded is computed here, unlike on a card: a rank that fails has sent what others wait for
            self.host.begin_step()
        with super().recording():
            yield
        if self._fails is not None:
            raise RuntimeError(self._fails)
        ways, replay = self._dealt.ways, self.replay

        def again() -> None:
            before, self._dealt.ways = self._dealt.ways, ways
            beside = nullcontext(self.stream) if self.host is None else self.host.computing(cast(Any, self), self.stream)
            with beside as stream, self._fed.by(stream):
                replay()
            self._dealt.ways = before

        self.replay = again

    def close(self) -> None:
        """Nothing was taken."""

    def write_word(self, address: int, value: int) -> None:
        ctypes.c_int32.from_address(address).value = value

    def wait_word(self, address: int, value: int) -> None:
        until = time.monotonic() + HANGS_S
        while ctypes.c_int32.from_address(address).value != value:
            assert time.monotonic() < until, "nobody wrote it"
            time.sleep(0)


class ByProducts:
    """An FFN of the whole model: while ``live``, what the CPU's product says of its rows in BF16."""

    live = False

    def __init__(self, pool: HostPool, ffn: HostFfn, module: nn.Module):
        self._pool, self._ffn, self._own = pool, ffn, module.forward
        module.forward = self

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if not ByProducts.live:
            return cast(torch.Tensor, self._own(hidden))
        rows = hidden.reshape(-1, hidden.shape[-1]).bfloat16()
        out = torch.empty_like(rows)
        self._pool.ffn(self._ffn, rows, out)
        return out.view_as(hidden).to(hidden.dtype)


class Ranks:
    """``count`` ranks in threads over one checkpoint. ``beside``: those whose last layers' FFNs are the CPU's in recorded steps."""

    def __init__(self, checkpoint: Path, count: int, fails: dict[int, str], beside: Sequence[int] = ()):
        load = AutoModelForCausalLM.from_pretrained
        whole = load(checkpoint, dtype=torch.float64).eval()
        self.whole, mail = unstreamed(whole, slots=SLOTS), Mail(count)
        self.dealing = dealing = Dealing.even(count, whole.config.num_hidden_layers)
        launched = ways_of(count, 8 * 64 * VOCAB)
        self.steppers: list[Stepper] = []
        self.steps: list[list[GraphSteps]] = []
        self.graphs: list[list[RankGraph]] = []
        self.pools = [HostPool(1) for _ in beside]
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
            pool, units = KvPool(SLOTS, PAGE_TOKENS, kinds(model.config), CPU), list[HostUnit]()
            stepper = Stepper(model, CPU, pool, dealt.begin_pass, kernel=ByDefinition())
            shared = SharedSteps(mail.of(number), count, dealt, self.meters[number], torch.float64)
            steps, graphs, fed = [], [], Fed(model)
            if number in beside:
                units = [self._unit(whole, decoder_layers(model), number)]
                ByProducts(self.pools[0], units[0].ffn, decoder_layers(whole)[dealing.of(number)[-1]].mlp)
            for one, each in SHAPES:
                graph = RankGraph(stepper, dealt, fed, fails.get(number))
                graph.stream = stream = RecordedStream((), {}, cast(Any, graph), Ledger())
                if units:
                    graph.host = HostSteps(self.pools[beside.index(number)], units, one * each, HostCopier(), Ledger(), in_turn=True)
                host = graph.host
                steps.append(GraphSteps(cast(Any, graph), cast(Any, graph), stream, cast(Any, None), fed.by, None, host, others=shared))
                graphs.append(graph)
            self.steppers.append(stepper)
            self.steps.append(steps)
            self.graphs.append(graphs)
            self.shared.append(shared)

    def _unit(self, whole: nn.Module, layers: Sequence[nn.Module], rank: int) -> HostUnit:
        """Of the last layer of ``rank``, in BF16."""
        local, module = len(layers) - 1, layers[-1].mlp
        tensors = {f"mlp.{name}": p.detach().bfloat16() for name, p in module.named_parameters()}
        return host_unit(Unit("ffn", local), "mlp", cast(nn.Module, module), tensors, "silu")

    def record(self) -> list[str | None]:
        """What each rank says of the first shape."""

        def rank(number: int) -> Callable[[], None]:
            def compute() -> None:
                agreed = self.shared[number].open(Card(), 8 * 8 * VOCAB, None, [], [])
                assert agreed == Agreed(None, [], frozenset())
                for steps, (rows, tokens) in zip(self.steps[number], SHAPES, strict=True):
                    longest_step(self.steppers[number], rows, MOST_TOKENS, steps.capture, tokens)
                if self.steps[number][0].refused is None:
                    self.steppers[number].graphs = cast(Any, ShapedSteps(self.steps[number][0], self.steps[number][1:]))

            return compute

        together(*(rank(number) for number in range(len(self.steppers))))
        return [steps[0].refused for steps in self.steps]

    def run(self, step: Step) -> torch.Tensor:
        """What rank 0 says of ``step``."""
        found: dict[int, torch.Tensor] = {}
        together(*(lambda n=n: found.update({n: self.steppers[n].run(step)}) for n in range(len(self.steppers))))
        return found[0]

    def expected(self, step: Step) -> torch.Tensor:
        """What the whole model says of it, its FFNs computed by whom the ranks have compute them."""
        graphs = self.steppers[0].graphs
        ByProducts.live = graphs is not None and graphs.serves(step)
        try:
            return self.whole.run(step)
        finally:
            ByProducts.live = False

    def close(self) -> list[int]:
        """All twice -> bytes of weights that each pool has read."""
        for _ in range(2):
            for shared, each in zip(self.shared, self.steps, strict=True):
                for steps in each:
                    steps.stop()
                shared.close()
        told = [pool.told().bytes for pool in self.pools]
        for pool in self.pools:
            pool.close()
        return told


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a card pins nothing."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **more: zeros(*a, **more))


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


@pytest.mark.parametrize(("count", "beside"), [(2, ()), (3, ()), (3, (0, 2)), (2, (1,)), (2, (0, 1))])
def test_recorded_steps_of_ranks_say_what_the_whole_model_says(
    checkpoint: Path, unlocked: None, count: int, beside: tuple[int, ...]
) -> None:
    ranks = Ranks(checkpoint, count, {}, beside)
    assert ranks.record() == [None] * count
    sequences = [KvSequence.of(number, list(range(7 * number + 1, 9 * number + 6))) for number in range(3)]
    for sequence in sequences:
        sequence.hold(ranks.steppers[0].pool.pages, MOST_TOKENS)
    hops = [(meter.received, meter.sent_bytes) for meter in ranks.meters]
    for step in steps_of(count, sequences):
        assert torch.allclose(ranks.run(step), ranks.expected(step), atol=1e-9, rtol=0)
    launched = [[steps.steps for steps in each] for each in ranks.steps]
    assert all(each == launched[0] for each in launched) and min(launched[0]) > 0, "all ranks take the same recording"
    for meter, (received, sent) in zip(ranks.meters, hops, strict=True):
        assert meter.received - received >= sum(launched[0]) and meter.sent_bytes > sent, "hops of recorded steps are counted"
    told = ranks.close()
    if beside:
        passes = sum(launched[0]) + len(SHAPES)  # those that were computed while they were recorded
        assert told[1:] == [passes * FFN_BYTES] * (len(beside) - 1), "each of its own, once a pass"
        assert told[0] == passes * FFN_BYTES + sum(launched[0]) * len(beside) * FFN_BYTES, "the whole model's as well"


@pytest.mark.parametrize("beside", [(), (0, 2)])
def test_a_step_that_one_rank_cannot_record_is_recorded_by_none(checkpoint: Path, unlocked: None, beside: tuple[int, ...]) -> None:
    ranks = Ranks(checkpoint, 3, {2: "out of memory"}, beside)
    assert ranks.record() == ["rank 2: out of memory"] * 3
    assert not any(steps.serves(Step(())) for each in ranks.steps for steps in each)
    sequence = KvSequence.of(0, [3, 4, 5])
    sequence.hold(ranks.steppers[0].pool.pages, MOST_TOKENS)
    step = Step((sequence.row(3, RowKind.prompt),))
    assert torch.allclose(ranks.run(step), ranks.expected(step), atol=1e-9, rtol=0)
    ranks.close()


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
        found[n] = shared[n].open(made[n], 100 * (1 - n), whys[n], shapes[n], ([1, 8], [2])[n])

    together(lambda: rank(0), lambda: rank(1))
    assert found == {n: Agreed(said, [VerifyShape(1, 8)], frozenset({1, 2, 8})) for n in (0, 1)}
    assert [one.leads for one in shared] == [True, False]
    assert not any(box.qsize() for box in mail.boxes.values()), "all that was said was heard"
    for one in shared:
        one.close()
    assert [card.locked for card in made] == [0, 0]


def test_a_card_that_waits_for_ranks_that_are_gone_goes_on() -> None:
    mail = Mail(2)
    shared = [
        SharedSteps(mail.of(rank), 2, cast(Any, DealtModel(Dealing((1, 1)), rank, VOCAB)), HopMeter(), torch.float32) for rank in (0, 1)
    ]
    together(lambda: shared[0].open(Card(), 64, None, [], []), lambda: shared[1].open(Card(), 64, None, [], []))
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
