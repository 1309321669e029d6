"""Steps in pieces, with a card that is played: each piece is computed anew, as far as the next layer's experts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.planner.common.measures import align_up
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.experts.expert_cache import Routing
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.engine.passes.generate import Batch, Generation, generate
from penstock.runtime.engine.passes.rehearsal import longest_step
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.experts.expert_forward import Arrived, ExpertsInTurn, Fit, Group, HandedExperts, WholeExperts, layer_experts
from penstock.runtime.experts.products.beside_card import Made
from penstock.runtime.experts.products.expert_table import APART, Lies
from penstock.runtime.experts.products.expert_views import PlacedTensors, SlotViews
from penstock.runtime.kv.attention.paged_host import HostKernel
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import kinds
from penstock.runtime.model.binding import Binder
from penstock.runtime.reading.layout import TensorLayout
from penstock.runtime.recorded.piece_steps import PieceSteps
from penstock.runtime.store.decoder import decoder_layers
from penstock.runtime.store.expert_modules import expert_parameters, layers_with_experts
from tests.runtime.steppers import CPU, PAGE_TOKENS
from tests.runtime.whole_experts import take_over
from tests.support import save_tiny

BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 20], max_new_tokens=9, chunk_tokens=1 << 20, limits=[9, 9, 5])
ALONE = Batch(prompts=[[5, 9, 200, 31, 7]], max_new_tokens=9, chunk_tokens=1 << 20, limits=[9])
ROUTED = 3
"""Layers with routed experts."""
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
        passed_by = [cut.number + 1 for cut in self._cuts() if cut.found is not None]
        assert number == self._at or (number == self._at + 1 and self._at in passed_by), "pieces are launched in their order"
        for cut in self._cuts():
            if cut.found is not None and cut.number + 1 == number:
                hidden, _, weights = cut.given
                cut.made.copy_(cut.experts.by_table(hidden, weights, cut.found))
                self._at = number + 1
                return
        if number == 0:
            threading.Thread(target=self._pass, daemon=True).start()
        else:
            self._go.release()
        assert self._came.acquire(timeout=WAIT_S) and not self._failed, self._failed
        last = number == sum(1 if cut.found is None else 2 for cut in self._cuts())
        self._at = 0 if last else number + 1

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


class SlottedExperts:
    """All experts of a model in slots behind each other, in another order in each layer."""

    def __init__(self, layers: nn.ModuleList):
        self._views: dict[int, list[PlacedTensors]] = {}
        for layer, module in layers_with_experts(layers):
            whole = expert_parameters(module)
            laid, end = [], 0
            for name, stacked in whole.items():
                laid.append(TensorLayout(name, tuple(stacked.shape[1:]), stacked.dtype, end, stacked[0].nbytes))
                end += align_up(stacked[0].nbytes)
            count = module.num_experts
            slots = torch.zeros(count, end, dtype=torch.uint8)
            views = SlotViews({(layer, expert): laid for expert in range(count)})
            self._views[layer] = [views.of((layer, e), slot, slots[slot]) for e in range(count) for slot in [(3 * e + layer) % count]]
            for expert, placed in enumerate(self._views[layer]):
                for name, tensor in placed.items():
                    tensor.copy_(whole[name][expert])

    def route(self, index: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return index

    def visit(self, layer: int, routing: Routing, fit: Fit) -> Iterator[Sequence[Arrived]]:
        experts = routing.experts
        while experts:
            together, experts = experts[: fit(experts)], experts[fit(experts) :]
            yield self.here(layer, together)

    def here(self, layer: int, experts: Sequence[int]) -> list[Arrived]:
        return [(expert, self._views[layer][expert]) for expert in experts]

    def groups(self, layer: int, routing: Routing) -> Iterator[Group]:
        yield Group(self.here(layer, routing.experts))


class ApartOnce(SlottedExperts):
    """Each third visit has its experts one after the other, as misses may come."""

    _visits = 0

    def groups(self, layer: int, routing: Routing) -> Iterator[Group]:
        self._visits += 1
        together = self.here(layer, routing.experts)
        yield from ([Group([one]) for one in together] if self._visits % 3 == 0 else [Group(together)])


class Shared(SlottedExperts):
    """Of each token's experts the first is computed elsewhere, with the others at every third visit, behind them at the next; all of them
    are at the one after that. Results have other rows each time."""

    def __init__(self, layers: nn.ModuleList):
        super().__init__(layers)
        self._runners = {runner.layer: runner for runner in layer_experts(layers)}
        self._visits = 0
        self.hidden = torch.empty(0)
        self.results = torch.zeros(4, layers[0].hidden_size, dtype=torch.bfloat16)

    def route(self, index: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden.clone()
        return index

    def groups(self, layer: int, routing: Routing) -> Iterator[Group]:
        self._visits += 1
        here = self.here(layer, routing.experts)
        count = len(here) if self._visits % 3 == 0 else 1
        elsewhere, here = here[:count], here[count:]

        def made() -> list[Made]:
            found = []
            for k, (expert, placed) in enumerate(elsewhere):
                at = (self._visits + k) % len(self.results)
                self.results[at] = self._runners[layer]._rows(self.hidden, [placed])[0]
                found.append(Made(expert, self.results[at : at + 1], at))
            return found

        if self._visits % 3 == 1:
            yield Group(here)
            yield Group((), count, made)
        else:
            yield Group(here, count, made)


class ReadFromTable:
    """``product`` with experts that lie where a table says, as a kernel would find them."""

    def __init__(self, product: Any, places: dict[int, PlacedTensors]):
        self._product, self._places = product, places

    def __getattr__(self, name: str) -> Any:
        return getattr(self._product, name)

    def tabled(self, rows: torch.Tensor, expert: PlacedTensors, table: torch.Tensor) -> torch.Tensor:
        begin = Lies.of(expert).begin
        return self._product.each(rows, [self._places[begin + APART * number] for number in table.tolist()])


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


def said(
    checkpoint: Path, in_pieces: bool, batch: Batch = BATCH, source: Callable[[nn.ModuleList], Any] = WholeExperts
) -> Iterator[tuple[Generation, dict, list]]:
    """What is said, what the report says of steps so far, and what the stream was told of a decode step."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    ExpertsInTurn().convert(model)
    layers, books = decoder_layers(model), Books()
    experts = source(layers)
    for runner in take_over(model, experts):
        if isinstance(experts, SlottedExperts):
            places = {Lies.of(placed).begin: placed for placed in experts._views[runner.layer]}
            runner._first, runner._last = ReadFromTable(runner._first, places), ReadFromTable(runner._last, places)
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
            lambda use: longest_step(stepper, len(batch.prompts), 40, use),
            lambda host: host,
            0,
            getattr(experts, "results", None),
        )
        if in_pieces:
            stepper.graphs = steps.record()
            assert steps.refused is None
        for _ in range(2):
            made = generate(stepper, batch, Sampler(Sampling(), CPU), keep_logits=True)
            yield made, steps.facts(), books.told[-2 * len(units) - 2 :]


def assert_alike(checkpoint: Path, told_alike: bool = False, **asked: Any) -> list[dict]:
    """Steps in pieces and launched ones say the same; the reports of the first. A played card tells of its own passes, too, so that only
    a last pass that is launched is ``told_alike``."""
    found = [list(said(checkpoint, in_pieces, **asked)) for in_pieces in (True, False)]
    for (got, facts, told), (want, launched, listed) in zip(*found, strict=True):
        assert got.tokens == want.tokens
        assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
        assert told == listed or not told_alike, "units are entered and left in the model's order"
        assert launched["steps"] == 0 and facts["steps"] > 0
    return [facts for _, facts, _ in found[0]]


def test_steps_in_pieces_say_what_a_model_says_that_is_called(checkpoint: Path) -> None:
    first, second = assert_alike(checkpoint, told_alike=True)
    assert second["steps"] == 2 * first["steps"]
    assert first["steps"] == 4, "as long as all rows decode: the shortest reply ends them"
    assert second["pieces"] == ROUTED + 1 and second["visits"] == 0, "rows of several sequences are sorted by expert"


def test_one_tokens_experts_are_one_launch(checkpoint: Path) -> None:
    """Each layer's experts lie in other slots, and each token has others."""
    for facts in assert_alike(checkpoint, batch=ALONE, source=SlottedExperts):
        assert facts["pieces"] == 2 * ROUTED + 1 and facts["visits"] == ROUTED * facts["steps"]


def test_experts_that_come_one_after_the_other_are_launched_so(checkpoint: Path) -> None:
    facts = assert_alike(checkpoint, batch=ALONE, source=ApartOnce)[-1]
    assert 0 < facts["visits"] < ROUTED * facts["steps"]


def test_experts_that_are_computed_elsewhere_have_their_rows_in_the_launch(checkpoint: Path) -> None:
    facts = assert_alike(checkpoint, batch=ALONE, source=Shared)[-1]
    assert 0 < facts["visits"] < ROUTED * facts["steps"]
