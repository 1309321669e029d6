"""Hops through shared memory: what comes is what was sent, in its order, and a dealt model says by them what it says as a whole."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.planner.contract.ranks.dealing import Dealing
from penstock.runtime.hops.shared_memory import Shared, SharedMemory
from penstock.runtime.hops.torch_hop import StagedHop
from penstock.runtime.hops.word_ways import LINE, HopPlaces, WordWays
from penstock.runtime.model.rows import Row, RowKind, Step
from penstock.runtime.ranks.dealt_model import DealtModel, EmbeddingElsewhere
from tests.cli import HANGS_S
from tests.support import save_tiny


class Looking:
    """Words that a card would write and wait for, by looking; ``slow`` comes before each."""

    def __init__(self, memory: torch.Tensor, slow: Callable[[], None] = lambda: None):
        self._begin, self._words, self._slow = memory.data_ptr(), memory.view(torch.int32), slow

    def write_word(self, address: int, value: int) -> None:
        self._slow()
        self._words[(address - self._begin) // 4] = value

    def wait_word(self, address: int, value: int) -> None:
        self._slow()
        until = time.monotonic() + HANGS_S
        while int(self._words[(address - self._begin) // 4]) != value:
            assert time.monotonic() < until, "nobody wrote it"
            time.sleep(0)


def ways_of(count: int, nbytes: int, slow: Callable[[], None] = lambda: None) -> list[WordWays]:
    places = HopPlaces(count, nbytes)
    memory = torch.zeros(places.all_bytes, dtype=torch.uint8)
    return [WordWays(rank, places, memory.data_ptr(), memory, Looking(memory, slow)) for rank in range(count)]


def together(*each: Callable[[], None]) -> None:
    """All at the same time; what one raises is raised."""
    raised: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():
                one()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * HANGS_S)
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("count", [2, 5])
def test_every_way_has_a_line_and_a_place_of_its_own(count: int) -> None:
    places = HopPlaces(count, 100)
    spans = [(places.word(*pair), places.word(*pair) + LINE) for pair in places.pairs]
    spans += [(places.place(*pair), places.place(*pair) + 100) for pair in places.pairs]
    ordered = sorted(spans)
    assert all(end <= begin for (_, end), (begin, _) in zip(ordered, ordered[1:], strict=False))
    assert ordered[-1][1] <= places.all_bytes and all(begin % LINE == 0 for begin, _ in spans)


@pytest.mark.parametrize("pace", [(0.0, 2e-3), (2e-3, 0.0)], ids=["a slow receiver", "a slow sender"])
def test_what_comes_is_what_was_sent_in_its_order_however_fast_either_side_is(pace: tuple[float, float]) -> None:
    here = threading.local()
    ways = ways_of(2, 64, lambda: time.sleep(pace[here.rank]))
    found: list[float] = []

    def send() -> None:
        here.rank = 0
        for number in range(20):
            ways[0].behind(1).send(torch.full((3, 4), float(number)))

    def receive() -> None:
        here.rank = 1
        for _ in range(20):
            into = torch.empty(3, 4)
            ways[1].before(0).receive(into)
            assert len(set(into.flatten().tolist())) == 1, "it was written over while it was read"
            found.append(float(into[0, 0]))

    together(send, receive)
    assert found == list(range(20))
    assert (ways[1].received, ways[1].received_bytes, ways[0].sent_bytes) == (20, 20 * 48, 20 * 48)


def test_a_hop_that_has_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="a hop of 72 bytes, where 64 have a place"):
        ways_of(2, 64)[0].behind(1).send(torch.zeros(9, dtype=torch.float64))


@pytest.mark.parametrize("count", [2, 3])
def test_a_dealt_model_says_by_words_what_it_says_as_a_whole(count: int, tmp_path: Path) -> None:
    """Three passes without a pause between them: nobody may be overtaken."""
    checkpoint = save_tiny(tmp_path / "model", layers=5)
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    vocab, passes = whole.config.vocab_size, [torch.arange(5 * k, 5 * k + 7)[None] for k in range(3)]
    dealing, ways = Dealing.even(count, whole.config.num_hidden_layers), ways_of(count, 7 * vocab * 4)
    found: list[torch.Tensor] = []

    def rank(number: int) -> Callable[[], None]:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        dealt, rows = DealtModel(dealing, number, vocab), dealing.vocab_rows(number, vocab)
        dealt.convert(model)
        dealt.ways = ways[number]
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.data[rows.start : rows.stop].clone(), requires_grad=False)
        if number:
            EmbeddingElsewhere().convert(model)

        def compute() -> None:
            for ids in passes:
                tokens = tuple(ids[0].tolist())
                dealt.begin_pass(Step((Row(0, tokens, 0, (0,), RowKind.verify, len(tokens)),)))
                logits = model(input_ids=ids, use_cache=False).logits
                if not number:
                    found.append(logits)

        return compute

    together(*(rank(number) for number in range(count)))
    with torch.inference_mode():
        for logits, ids in zip(found, passes, strict=True):
            assert torch.allclose(logits, whole(input_ids=ids, use_cache=False).logits, atol=1e-5, rtol=0)


def test_what_goes_through_memory_of_both_processes_is_what_was_sent() -> None:
    class Kept:
        """Sends to itself."""

        held: torch.Tensor

        def coming(self, into: torch.Tensor) -> Callable[[], None]:
            return lambda: None if into.copy_(self.held) is into else None

        def receive(self, into: torch.Tensor) -> None:
            raise AssertionError("what comes meanwhile would be waited for")

        def send(self, hidden: torch.Tensor) -> None:
            self.held = hidden

    hop, into = StagedHop(Kept()), torch.zeros(2, 3)
    hop.send(torch.arange(6.0).view(2, 3))
    arrive = hop.coming(into)
    assert not into.any(), "it is not there before it is waited for"
    arrive()
    assert into.flatten().tolist() == list(range(6))


def test_another_process_reads_and_writes_the_same_memory() -> None:
    memory = SharedMemory(5000)
    try:
        memory.bytes[4999] = 7
        told = ", ".join(map(str, memory.shared))
        other = (
            "from penstock.runtime.hops.shared_memory import Shared, SharedMemory\n"
            f"memory = SharedMemory(Shared({told}))\n"
            "memory.bytes[0] = memory.bytes[4999] + 1\n"
            "memory.close(); memory.close()\n"
        )
        subprocess.run([sys.executable, "-c", other], check=True, timeout=HANGS_S)
        assert int(memory.bytes[0]) == 8 and memory.nbytes == 8192
    finally:
        memory.close()
    with pytest.raises(OSError):
        SharedMemory(Shared(1 << 22, 3, 4096))


def test_memory_whose_pages_are_not_locked_is_no_memory_of_hops() -> None:
    class Refusing:
        def lock(self, address: int, nbytes: int) -> str | None:
            return "CUDA error 2"

        def unlock(self, address: int) -> None:
            raise AssertionError("it was never locked")

    with pytest.raises(RuntimeError, match="not page-locked: CUDA error 2"):
        SharedMemory(4096, Refusing())
