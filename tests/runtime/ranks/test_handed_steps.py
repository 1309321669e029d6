"""Steps of several ranks of which the CPU computes units: what they say, and what their rings leave out."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.formats import KNOWN_FORMATS
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.policy.walk import Walk
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.handed.handed_steps import HandedSteps
from penstock.runtime.handed.launched_units import LaunchedUnits
from penstock.runtime.handed.ring_turns import RingTurns, Standing, Walked
from penstock.runtime.kv.batch.page_pool import PagePool
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.model.rows import Row, RowKind, Step
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.moving.ring import UnitSource, VramRing
from penstock.runtime.recorded.host_steps import host_unit
from tests.runtime.fakes import FakeDevice
from tests.runtime.formats.coded_checkpoints import compressed, gptq, packed, whole
from tests.runtime.formats.test_whole_checkpoints import GPTQ, Made, made, weights
from tests.runtime.ranks import played_cards
from tests.runtime.ranks.company import EVERY, dealt_plan
from tests.runtime.ranks.played_cards import steps
from tests.runtime.ranks.played_runs import run_played, said_as_the_whole
from tests.runtime.test_host_steps import Gated
from tests.support import HostCopier, decisions, machine, save_tiny

TIMED = Curve(((1, 20.0), (4, 20.0)))
RATES = HostRates(
    2, {"BF16": TIMED}, 1e-5, 0.75, 0.84, attention_hop_s=1e-4, f16_products=dict.fromkeys(("F16", "INT4-128", "GPTQ4-128"), TIMED)
)
ROWS, CLOSE = 2, {torch.bfloat16: 0.02, torch.float16: 0.0025}
"""Rows that the CPU computes, and how far logits may be apart, of the largest one: F16 has three bits more."""
CASES: dict[str, tuple[int | tuple[int, ...], int, dict[str, Any]]] = {
    "some units stream": (2, 2, {"resident": (1, 0, 1), "cap": 3, "hwm": 6, "distance": 3}),
    "nothing streams in a step": (2, 3, {"resident": (3, 0, 1), "cap": 3, "hwm": 6, "distance": 3}),
    "three ranks, one slot ahead": (
        3,
        1,
        {"resident": (0, 0, 0), "cap": 2, "hwm": 6, "distance": 2, "head_blocks": 2, "slots": 3, "vram_distance": 1},
    ),
    "ranks with unlike numbers of layers": ((4, 2), 2, {"resident": (1, 0, 1), "cap": 2, "hwm": 6, "distance": 3}),
}
"""Ranks, or the layers of each; units of each; what all decide."""


@pytest.mark.parametrize("case", CASES if EVERY else [*CASES][:1])
def test_what_the_cpu_computes_for_each_rank_is_what_the_whole_model_says(case: str, tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path / "model")
    hold_to_transformers(case, checkpoint, checkpoint, torch.bfloat16, 3 * 64 * 160 * 2, tmp_path)


HALVES = {
    "F16": Made("llama", torch.float16, lambda m: whole(m, 8, 0, torch.float16, True), lambda w: {"weight": w.decoded()}, {}),
    "INT4-32": Made(
        "llama",
        torch.float16,
        lambda m: whole(m, 4, 32, torch.float16, True),
        lambda w: packed(w, 4),
        compressed("pack-quantized", weights(4, 32)),
    ),
    "GPTQ4-32": Made("llama", torch.float16, lambda m: whole(m, 4, 32, torch.float16), lambda w: gptq(w, 4), GPTQ | {"group_size": 32}),
}
"""Checkpoints that compute in F16."""


@pytest.mark.skipif(not EVERY, reason="make test-ranks runs it")
@pytest.mark.parametrize("form", HALVES)
def test_what_the_cpu_computes_in_f16_is_what_the_whole_model_says(form: str, tmp_path: Path) -> None:
    checkpoint, numbers = made(tmp_path, HALVES[form], {}, 6), 3 * 64 * 160
    each = KNOWN_FORMATS[form].stored_bytes(1, numbers)
    hold_to_transformers("some units stream", checkpoint, tmp_path / "decoded", torch.float16, each, tmp_path)


def hold_to_transformers(case: str, checkpoint: Path, decoded: Path, dtype: torch.dtype, each: int, tmp_path: Path) -> None:
    """A played company's logits of ``checkpoint``, whose FFNs have ``each`` bytes, are those that transformers gives of ``decoded``."""
    dealt, units, decided = CASES[case]
    count = dealt if isinstance(dealt, int) else len(dealt)
    card = machine(True, cpu_cores=count, cpu_threads=count, devices=tuple(range(count)), host=RATES)
    chosen = decisions(gpu=True, batch=3, pages=16, **decided)
    chosen = replace(chosen, weights=replace(chosen.weights, host=HostUnits(units, ROWS)))
    plan = dealt_plan(checkpoint, chosen, dealt, card, batch=3, requests=3)
    found = said_as_the_whole(run_played(played_cards, plan, checkpoint, tmp_path, {}), tmp_path, decoded, dtype, CLOSE[dtype])
    asked = list(steps(PagePool(160, 16)))
    handed = [step for step in asked if len(step.rows) <= ROWS and len(step.rows[0].tokens) == 1]
    told = found["told"]["handed"], *(report["handed"] for report in found["told"]["others"])
    assert all(one == {"steps": len(handed), "refused": None} for one in told) and len(handed) < len(asked) - 3
    assert found["told"]["stages"]["cpu"][0] == len(handed) * units * each, "the bytes of its own units"
    others = [report["stages"]["decode"]["cpu"]["bytes"] for report in found["told"]["others"]]
    assert others == [len(handed) * units * each] * (count - 1)


class Told(HostPool):
    """Says when its threads are woken."""

    def __init__(self) -> None:
        super().__init__(1)
        self.said: list[float] = []

    def near(self, seconds: float = 0.005) -> None:
        self.said.append(seconds)
        super().near(seconds)


def test_threads_sleep_until_a_layer_begins_and_again_behind_its_unit() -> None:
    """Other ranks' threads have the same cores, and nobody's unit is due until this rank's attention begins."""
    torch.manual_seed(0)
    module = Gated()
    unit = host_unit(Unit("ffn", 1), "mlp", module, {f"mlp.{n}": p.detach() for n, p in module.named_parameters()}, "silu")
    x, pool, waits = torch.randn(1, 2, 32, dtype=torch.bfloat16), Told(), list[object]()

    class Waiting(HostCopier):
        def host_waits(self, event: float) -> None:
            waits.append((event, list(pool.said)))

    with pool, torch.inference_mode():
        want, ledger = module(x), Ledger()
        units = LaunchedUnits(pool, [unit], 2, cast(Any, Waiting()), False, ledger, 4)
        assert torch.equal(module(x), want) and not pool.said and not waits, "a rehearsal computes with its module"
        units.begin_pass(True)
        units.entered(Unit("attn", 0))
        units.entered(Unit("attn", 1))
        got = module(x)
        assert torch.allclose(got.float(), want.float(), atol=0.02 * want.abs().max().item(), rtol=0)
        assert [said for _, said in waits] == [[], [0.005]] and pool.said == [0.005, 0], "woken between both waits, asleep at the end"
        assert waits[0] < waits[1]
        units.close()
        units.close()
        assert torch.equal(module(x), want)
    assert ledger.totals()["cpu"].bytes == unit.ffn.bytes


class Dram:
    """Units that lie where they lie, each with bytes of its own."""

    def __init__(self, units: list[Unit], nbytes: int):
        self._at = {unit: torch.full((nbytes,), number + 1, dtype=torch.uint8) for number, unit in enumerate(units)}
        self.cache = self

    def stays(self, unit: Unit) -> torch.Tensor:
        return self._at[unit]

    def wait_preloaded(self) -> None:
        """They are there."""

    def wait_for(self, layers: Collection[int]) -> None:
        """They are there, too."""


class ReadDram(Dram):
    """Some units are ``read`` for each visit, and are gone behind it. Says which were visited."""

    def __init__(self, units: list[Unit], nbytes: int, read: set[Unit], draw: random.Random):
        super().__init__(units, nbytes)
        self._read, self._draw, self._kept = read, draw, {unit: at.clone() for unit, at in self._at.items()}
        self.visits: list[Unit] = []
        for unit in read:
            self._at[unit].fill_(0)

    def arrived(self, unit: Unit) -> bool:
        return self._draw.random() < 0.5

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]:
        self.visits.append(unit)
        return 0, self._at[unit].copy_(self._kept[unit])

    def release(self, unit: Unit) -> None:
        if unit in self._read:
            self._at[unit].fill_(0)


class Rings:
    """Prompts stream ``units``, steps those of them that are not ``left_out``; a test is copiers, retirers and the card. Layers that are
    ``read`` come from the SSD in each pass."""

    def __init__(
        self,
        layers: int,
        left_out: set[int],
        slots: tuple[int, int],
        distance: int,
        draw: random.Random,
        read: Collection[int] = (),
    ):
        self.units = [Unit(kind, layer) for layer in range(layers) for kind in ("attn", "ffn")]
        self.of_steps = [unit for unit in self.units if unit.kind == "attn" or unit.layer not in left_out]
        passing = {unit for unit in self.units if unit.layer in read}
        self.dram, self.draw = ReadDram(self.units, 8, passing, draw), draw
        self.device = FakeDevice(draw.choice)
        walk = Walk(self.units, passing) if read else None

        def source() -> UnitSource:
            return Standing(cast(Any, self.dram)) if walk is None else Walked(walk, cast(Any, self.dram))

        buffers = {name: [torch.zeros(8, dtype=torch.uint8) for _ in range(n)] for name, n in zip(("attn", "ffn"), slots, strict=True)}
        pieces = (Segment(0, 0, 4), Segment(4, 4, 4))
        self.rings = [
            VramRing(
                units,
                lambda _: pieces,
                buffers,
                source(),
                self.device,
                distance,
                2,
                Ledger(),
                late=() if walk is None else walk.late(units),
            )
            for units in (self.units, self.of_steps)
        ]
        copy = self.device.copy

        def bring(unit: Unit, into: torch.Tensor) -> None:
            assert unit not in passing, "it would have to be read again"
            copy(into, self.dram.stays(unit))

        self.turns = RingTurns(*self.rings, bring, cast(Any, self.dram), self.device, walk)
        self.threads = [_Driven(work) for ring in self.rings for work in (ring.copying(), ring.retiring())]
        self.rings[1].pause()
        for ring in self.rings:  # whoever waits has the others go on
            ring._consumer = cast(Any, self)
        self.seen: list[tuple[Unit, int]] = []

    def tell(self) -> None:
        """Of a waiter: nobody sleeps."""

    def wait(self, ready: Any) -> None:
        for _ in range(10_000):
            if ready():
                return
            self.go_on()
        raise AssertionError("nothing can bring it about")

    def go_on(self) -> None:
        able = [*(thread for thread in self.threads if thread.ready()), *self.device.enabled()]
        if not able:
            return
        one = self.draw.choice(able)
        if isinstance(one, str):
            self.device.advance(one)
        else:
            one.step()

    def pass_over(self, ring: int) -> None:
        self.turns.take(self.rings[ring])
        self.rings[ring].begin_pass()
        for unit in (self.units, self.of_steps)[ring]:
            _, buffer = self.rings[ring].enter(unit)
            self.device.launch(lambda unit=unit, buffer=buffer: self.seen.append((unit, int(buffer.min()), int(buffer.max()))))  # type: ignore[misc]
            self.rings[ring].leave(unit, self.device.compute_event())
            self.go_on_at_most(self.draw.randrange(4))
        self.go_on_at_most(self.draw.choice([0, 5, 60]))

    def go_on_at_most(self, times: int) -> None:
        for _ in range(times):
            self.go_on()


class _Driven:
    def __init__(self, work: Iterator[Any]):
        self._work, self._next = work, next(work)

    def ready(self) -> bool:
        return self._next is not None and bool(self._next())

    def step(self) -> None:
        self._next = next(self._work, None)


@pytest.mark.parametrize("seed", range(150))
def test_two_rings_over_the_same_slots_never_show_a_unit_that_is_not_there(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(1, 5)
    left_out = {layer for layer in range(layers) if draw.random() < 0.5}
    rings = Rings(layers, left_out, (draw.randint(1, 3), draw.randint(1, 3)), draw.randint(1, 5), draw)
    passes = [draw.randrange(2) for _ in range(8)]
    for ring in passes:
        rings.pass_over(ring)
    rings.device.on_compute_path = False
    rings.wait(lambda: not rings.device._queues["compute"])
    want = [unit for ring in passes for unit in (rings.units, rings.of_steps)[ring]]
    numbers = {unit: number + 1 for number, unit in enumerate(rings.units)}
    assert rings.seen == [(unit, numbers[unit], numbers[unit]) for unit in want]


@pytest.mark.parametrize("seed", range(150))
def test_units_that_are_read_for_each_pass_are_visited_once_in_their_order_whichever_ring_goes(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(2, 6)
    read = set(draw.sample(range(layers), draw.randint(1, layers - 1)))
    left_out = {layer for layer in range(layers) if layer not in read and draw.random() < 0.6}
    rings = Rings(layers, left_out, (draw.randint(1, 3), draw.randint(1, 3)), draw.randint(1, 5), draw, read)
    passes = [draw.randrange(2) for _ in range(8)]
    for ring in passes:
        rings.pass_over(ring)
    rings.device.on_compute_path = False
    rings.wait(lambda: not rings.device._queues["compute"])
    numbers = {unit: number + 1 for number, unit in enumerate(rings.units)}
    want = [unit for ring in passes for unit in (rings.units, rings.of_steps)[ring]]
    assert rings.seen == [(unit, numbers[unit], numbers[unit]) for unit in want]
    visits = rings.dram.visits
    assert visits == [rings.units[number % len(rings.units)] for number in range(len(visits))]
    read_last = max(number for number, unit in enumerate(rings.units) if unit.layer in read)
    assert len(visits) > 7 * len(rings.units) + read_last


def test_a_unit_that_is_not_the_cards_is_never_handed_over() -> None:
    """Of the first prompt; each rank sees to its own."""
    torch.manual_seed(1)
    module, other = Gated(), Gated()
    x, told = torch.randn(1, 5, 32, dtype=torch.bfloat16), list[str]()

    def units_of(weights: Gated, pool: HostPool) -> LaunchedUnits:
        unit = host_unit(Unit("ffn", 0), "mlp", module, {f"mlp.{n}": p.detach() for n, p in weights.named_parameters()}, "silu")
        return LaunchedUnits(pool, [unit], 2, HostCopier(), False, Ledger(), 4, told.append)

    with HostPool(1) as pool, torch.inference_mode():
        for weights in (module, other):
            units = units_of(weights, pool)
            units.begin_pass(False, real=False)
            want = module(x)
            assert units.refused is None, "a rehearsal has no weights to go by"
            units.begin_pass(False)
            assert torch.equal(module(x), want)
            assert (units.refused is None) is (weights is module)
            units.close()
        assert [line.split(":")[1] for line in told] == [" all units are copied to the card"]
        others, step = cast(Any, ("prompts", "ring", "steps", "of steps", _Turns())), Step((Row(0, (5,), 3, (0,), RowKind.decode),))
        refused = HandedSteps(HostUnits(1, 2), units, *others)
        assert refused.stream_of(step) == "prompts" and refused.facts()["steps"] == 0
        handed = HandedSteps(HostUnits(1, 2), units_of(module, pool), *others)
        assert handed.stream_of(step) != "prompts"
        drafted, longer = (Step((Row(0, (5,) * tokens, 3, (0,), RowKind.verify),)) for tokens in (2, 3))
        prompt = Step((Row(0, (5,), 3, (0,), RowKind.prompt),))
        assert handed.stream_of(drafted) != "prompts" and handed.stream_of(longer) == handed.stream_of(prompt) == "prompts"


class _Turns:
    def take(self, ring: str) -> None:
        """One of both."""


def test_a_module_whose_forward_was_replaced_before_gets_that_back() -> None:
    module, asked = Gated(), list[nn.Module]()
    own = module.forward
    module.forward = lambda x: (asked.append(module), own(x))[1]  # type: ignore[func-returns-value,assignment]
    unit = host_unit(Unit("ffn", 0), "mlp", module, {f"mlp.{n}": p.detach() for n, p in module.named_parameters()}, "silu")
    with HostPool(1) as pool:
        units = LaunchedUnits(pool, [unit], 1, HostCopier(), False, Ledger(), 4)
        units.close()
    module(torch.zeros(1, 1, 32, dtype=torch.bfloat16))
    assert asked == [module]
