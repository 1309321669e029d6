"""Pages in three tiers: what is restored is what was computed, wherever it lay and in whatever order a device works."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from tests.runtime.kv.batches import TOKENS, Served, served
from tests.runtime.kv.tier_cases import OTHER, PAGE, STEM, at_random, first, last, tokens


def test_without_a_card_pages_come_from_dram_and_in_a_later_run_from_disk(plan: Plan, tmp_path: Path) -> None:
    with served(plan, tmp_path / "kv") as run:
        assert run.batch([STEM]) == [0]
        assert run.batch([STEM]) == [96]
        facts = run.prefix.facts()
        assert tokens(facts) == (0, 96, 0) and facts["pages_captured"] == 6 == facts["pages_written"]
        assert facts["requests"][1]["restored_bytes"] == {"vram": 0, "dram": 6 * PAGE, "ssd": 0}
        assert facts["requests"][1]["computed_tokens"] == 4 and facts["disk"]["read_hits"] == 0
    with served(plan, tmp_path / "kv") as run:
        assert run.batch([STEM]) == [96]
        facts = run.prefix.facts()
        assert tokens(facts) == (0, 0, 96) and facts["pages_captured"] == 0
        assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (0, 96, 0), "what came from disk stays in DRAM"
        assert run.prefix.facts()["restored_bytes"] == {"vram": 0, "dram": 6 * PAGE, "ssd": 6 * PAGE}


def test_without_a_directory_pages_live_in_memory(plan: Plan) -> None:
    with served(plan) as run:
        assert [run.batch([STEM]), run.batch([STEM])] == [[0], [96]]
        facts = run.prefix.facts()
        assert facts["disk"] is None and facts["pages_written"] == 0 == facts["failures"] and tokens(facts) == (0, 96, 0)


@pytest.mark.parametrize("bounce", [1, 2, 5])
@pytest.mark.parametrize("choose", [first, last])
def test_a_card_restores_from_each_tier(card_plan: Plan, tmp_path: Path, choose: Callable, bounce: int) -> None:
    with served(card_plan, tmp_path / "kv", choose, bounce=bounce) as run:
        assert [run.batch([STEM]), run.batch([STEM])] == [[0], [96]]
        assert tokens(run.prefix.facts()) == (96, 0, 0)
        run.prefix.forget()
        assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (0, 96, 0)
    with served(card_plan, tmp_path / "kv", choose, bounce=bounce) as run:
        assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (0, 0, 96)
        assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (96, 0, 0), "what was brought stays in the pool"


def test_pages_that_come_together_lie_one_behind_the_other(card_plan: Plan) -> None:
    """Attention reads them as they lie. A free page before them would not do for all."""
    with served(card_plan, None, first, bounce=2) as run:
        run.batch([STEM])
        run.prefix.forget()
        pool, sequence = run.memory.pool, KvSequence.of(0, STEM)
        alone, other = pool.take(2)
        pool.release([alone])
        run.prefix.restore([sequence])
        assert sequence.cached == 96 and sequence.pages == list(range(other + 1, other + 7))
        run.prefix.confirm()
        sequence.release(pool)
        pool.release([other])


class Copied(TorchDispatchMode):
    """Counts the bytes that torch writes inside."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for tensor in (t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)):
            self.nbytes += 0 if func.is_view else tensor.nbytes
        return out


def test_a_hit_of_4096_tokens_in_vram_copies_no_byte(card_plan: Plan) -> None:
    """Nor does any other sequence of the batch that begins alike; each goes on in a page of its own."""
    stem = [i % 300 for i in range(4096)]
    with served(card_plan, None, first, slots=270, dram=300) as run:
        run.batch([[*stem, 5]])
        run.device.drain()
        sequences = [KvSequence.of(i, [*stem, i, 6, 7]) for i in range(3)]
        with Copied() as copied:
            run.prefix.restore(sequences)
            run.prefix.confirm()
            run.device.drain()
        assert [s.cached for s in sequences] == [4096] * 3 and copied.nbytes == 0
        assert sequences[0].pages == sequences[1].pages == sequences[2].pages and len(sequences[0].pages) == 256
        for sequence in sequences:
            sequence.hold(run.memory.pool, 4099)
        assert len({s.pages[-1] for s in sequences} | set(sequences[0].pages[:-1])) == 256 + 3
        assert run.prefix.facts()["restored_bytes"] == {"vram": 0, "dram": 0, "ssd": 0}
        with Copied() as copied:
            run.prefix.forget()
            for sequence in sequences:
                sequence.release(run.memory.pool)
            run.prefix.restore(sequences[:1])
            run.prefix.confirm()
            run.device.drain()
        assert copied.nbytes >= 256 * PAGE, "what comes from DRAM is counted"
        sequences[0].release(run.memory.pool)


@pytest.mark.parametrize("seed", range(25))
def test_any_order_of_the_devices_work_gives_the_same_kv(card_plan: Plan, tmp_path: Path, seed: int) -> None:
    """Batches of unequal prompts that share beginnings, with few pages everywhere: every row is judged where it is computed with."""
    dice = random.Random(seed)
    directory = tmp_path / "kv" if seed % 2 else None
    room = 3 * 8 + dice.randint(0, 6)
    with served(card_plan, directory, at_random(seed), (), dice.randint(2, 12), dice.randint(1, 5), room) as run:
        for _ in range(6):
            stems = [dice.choice([STEM, OTHER]) for _ in range(dice.randint(1, 3))]
            prompts = [stem[: dice.randint(1, 100)] + [dice.randint(1, 3)] for stem in stems]
            run.batch(prompts, [[5] * 20] * len(prompts), finish=dice.random() < 0.7)
        facts = run.prefix.facts()
        assert facts["failures"] == 0


@pytest.mark.parametrize("choose", [first, last])
def test_pages_that_are_pushed_out_of_vram_go_to_dram(card_plan: Plan, choose: Callable) -> None:
    """DRAM has fewer pages than the pool and forgot the first prompt, whose last page comes back to it when the pool needs the room."""
    with served(card_plan, None, choose, (), dram=4, slots=10) as run:
        push_out(run)
        assert run.batch([STEM[: 5 * TOKENS + 1]]) == [5 * TOKENS]
        assert tokens(run.prefix.facts()) == (4 * TOKENS, TOKENS, 0)


def push_out(run: Served) -> None:
    run.batch([STEM[: 5 * TOKENS + 1]])
    run.batch([OTHER[: 4 * TOKENS + 1]])
    assert run.prefix.facts()["pages_demoted"] == 0
    run.batch([[4] * (TOKENS + 1)])
    assert run.prefix.facts()["pages_demoted"] == 1


def test_pages_of_running_sequences_are_never_pushed_out(card_plan: Plan) -> None:
    with served(card_plan, None, first, slots=7) as run:
        run.batch([STEM[: 3 * TOKENS + 1]])
        held = KvSequence.of(0, STEM[: 3 * TOKENS + 1])
        run.prefix.restore([held])
        run.prefix.confirm()
        assert held.cached == 3 * TOKENS
        run.memory.pool.take(4)
        with pytest.raises(RuntimeError, match="1 pages of KV are wanted, 0 of 7 are free"):
            run.memory.pool.take(1)
        run.memory.pool.release(range(7))


def test_restoring_from_dram_waits_for_no_copy(card_plan: Plan) -> None:
    with served(card_plan, None, first, bounce=2) as run:
        run.batch([STEM])
        run.prefix.forget()
        run.device.drain()
        sequence = KvSequence.of(0, STEM)
        with run.no_waiting():
            run.prefix.restore([sequence])
        run.prefix.confirm()
        assert sequence.cached == 96
        sequence.release(run.memory.pool)


@pytest.mark.parametrize("host_layers", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_layers_in_dram_take_their_part_of_each_page(card_plan: Plan, tmp_path: Path, host_layers: tuple[int, ...], seed: int) -> None:
    settled: list[bool] = []
    for start in ([0, 0, 0], [96, 48, 48]):
        options = {"bounce": 3, "settle": lambda: settled.append(True)}
        with served(card_plan, tmp_path / "kv", at_random(seed), host_layers, **options) as run:
            assert run.batch([STEM, OTHER[:50], STEM[:60]]) == start
            run.prefix.forget()
            assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (0, 96, 0)
            assert run.batch([STEM]) == [96] and tokens(run.prefix.facts()) == (96, 0, 0)
    assert settled


def test_layers_in_dram_leave_the_pool_with_their_page(card_plan: Plan) -> None:
    with served(card_plan, None, at_random(7), (1,), dram=4, slots=10) as run:
        push_out(run)
        assert run.batch([STEM[: 5 * TOKENS + 1]]) == [5 * TOKENS] and run.prefix.facts()["failures"] == 0
