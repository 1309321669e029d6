"""Steps in pieces, with a card that is played: each piece is computed anew, as far as the next layer's experts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.engine.generate import Batch, Generation, generate
from penstock.runtime.engine.rehearsal import longest_step
from penstock.runtime.engine.sampling import Sampler, Sampling
from penstock.runtime.engine.stepper import Stepper
from penstock.runtime.experts.expert_forward import HandedExperts, WholeExperts
from penstock.runtime.kv.attention.paged_host import HostKernel
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import kinds
from penstock.runtime.model.binding import Binder
from penstock.runtime.recorded.piece_steps import PieceSteps
from penstock.runtime.store.decoder import decoder_layers
from tests.runtime.steppers import CPU, PAGE_TOKENS
from tests.runtime.whole_experts import take_over
from tests.support import save_tiny

BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 20], max_new_tokens=9, chunk_tokens=1 << 20, limits=[9, 9, 5])
WAIT_S = 60


class PlayedPieces:
    """A thread that computes a whole pass, and at each cut waits for the launch of the next piece. What it leaves for the experts goes to
    the tensors that were there when it was recorded; what it goes on with is read from them."""

    def __init__(self, model: HandedExperts, cuts: Callable[[], list]):
        self._model, self._cuts, self._at = model, cuts, 0
        self._go, self._came = threading.Semaphore(0), threading.Semaphore(0)
        self._failed: list[BaseException] = []

    def warming(self) -> nullcontext:
        return nullcontext()

    def record(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._compute, self._made = compute, compute().clone()
        return self._made

    def cut(self) -> None:
        """Somebody else remembers where."""

    def launch(self, number: int) -> None:
        assert number == self._at, "pieces are launched in their order"
        if number == 0:
            threading.Thread(target=self._pass, daemon=True).start()
        else:
            self._go.release()
        assert self._came.acquire(timeout=WAIT_S) and not self._failed, self._failed
        self._at = (number + 1) % (len(self._cuts()) + 1)

    def close(self) -> None:
        self._made = torch.empty(0)

    @torch.inference_mode()
    def _pass(self) -> None:
        try:
            with self._model.handed_over(self._at_cut):
                self._made.copy_(self._compute())
        except BaseException as error:
            self._failed.append(error)
        self._came.release()

    def _at_cut(self, layer: int, experts: object) -> Callable[..., torch.Tensor]:
        cut = next(cut for cut in self._cuts() if cut.layer == layer)

        def wait(*given: torch.Tensor) -> torch.Tensor:
            for kept, new in zip(cut.given, given, strict=True):
                kept.copy_(new)
            self._came.release()
            assert self._go.acquire(timeout=WAIT_S)
            return cut.made.clone()

        return wait


class Books:
    """A stream of weights that moves nothing: which units it was told of."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Unit]] = []

    def begin_pass(self) -> None:
        self.told.append(("begin", Unit("attn", 0)))

    def enter(self, unit: Unit) -> dict:
        self.told.append(("enter", unit))
        return {}

    def leave(self, unit: Unit) -> None:
        self.told.append(("leave", unit))

    def end_pass(self) -> None:
        self.told.append(("end", Unit("head", 0)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pieces"), "qwen3_moe", layers=4, mlp_only_layers=[1])


def said(checkpoint: Path, in_pieces: bool) -> Iterator[tuple[Generation, int, list]]:
    """What is said, steps in pieces, and what the stream was told of a decode step."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    layers, books = decoder_layers(model), Books()
    take_over(model, WholeExperts(layers))
    units = [Unit(kind, layer) for layer in range(len(layers)) for kind in ("attn", "ffn")]
    binder = Binder(model, units, books)
    with closing(HostPool(1)) as threads:
        pool = KvPool(64, PAGE_TOKENS, kinds(model.config), CPU)
        stepper = Stepper(model, CPU, pool, lambda step: binder.begin_pass(), kernel=HostKernel(threads))
        routed = HandedExperts(layers)
        steps = PieceSteps(
            stepper,
            lambda: PlayedPieces(routed, lambda: steps._cuts),
            routed,
            units,
            lambda: books,
            lambda step: books.begin_pass(),
            lambda use: longest_step(stepper, 3, 40, use),
            lambda host: host,
        )
        if in_pieces:
            stepper.graphs = steps.record()
            assert steps.refused is None
        for _ in range(2):
            made = generate(stepper, BATCH, Sampler(Sampling(), CPU), keep_logits=True)
            yield made, steps.steps, books.told[-2 * len(units) - 2 :]


def test_steps_in_pieces_say_what_a_model_says_that_is_called(checkpoint: Path) -> None:
    found = [list(said(checkpoint, in_pieces)) for in_pieces in (True, False)]
    for (got, steps, told), (want, launched, listed) in zip(*found, strict=True):
        assert got.tokens == want.tokens
        assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
        assert told == listed, "units are entered and left in the model's order"
        assert launched == 0 and steps > 0
    assert found[0][1][1] == 2 * found[0][0][1]
    assert found[0][0][1] == 4, "as long as all rows decode: the shortest reply ends them"
