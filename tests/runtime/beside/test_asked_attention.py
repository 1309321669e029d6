"""Attention that threads begin when a card asks for it: the result of attention at once, new K and V in their places, and an end to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from penstock.planner.common.threads import allowed_cores
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.beside.host_serve import FLAG_WORDS
from penstock.runtime.kv.attention.page_tables import Traits
from penstock.runtime.kv.attention.paged_host import HostKernel
from penstock.runtime.timed.attention_times import DIM, KV_HEADS, KvLayers

TRAITS = Traits(DIM**-0.5, None, None, None, None)
LAST = 2**31 - 1


@pytest.fixture
def pool() -> Iterator[HostPool]:
    with HostPool(2) as made:
        yield made


class Asking:
    """One layer of K and V of random numbers, and the words of a card that asks for its attention."""

    def __init__(self) -> None:
        self.layers = KvLayers(3, 600, torch.zeros(8 << 20, dtype=torch.uint8))
        for states in self.layers.held[0]:
            states.normal_()
        self.ask, self.done = (torch.zeros(FLAG_WORDS, dtype=torch.int32) for _ in range(2))
        self.times, self.out = torch.zeros(2, dtype=torch.int64), torch.zeros_like(self.layers.query)

    def post(self, pool: HostPool, turn: int, new: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None) -> None:
        asked = HostKernel(pool).asked(self.layers.query, self.layers.held[0], self.layers.tables, TRAITS, self.out)
        if new is not None:
            asked.new_keys, asked.new_values, asked.places = (one.data_ptr() for one in new)
        pool.attend_asked(asked, self.ask.data_ptr(), self.done.data_ptr(), turn, self.times.data_ptr())

    def expected(self, pool: HostPool) -> torch.Tensor:
        out = torch.zeros_like(self.out)
        HostKernel(pool).attend(self.layers.query, self.layers.held[0], self.layers.tables, TRAITS, out)
        return out

    def await_done(self, turn: int) -> None:
        until = time.monotonic() + 20
        while int(self.done[0]) != turn:
            assert time.monotonic() < until, "the threads do not come"
            time.sleep(1e-4)


def test_it_begins_when_the_word_is_written_and_says_when_it_is_over(pool: HostPool) -> None:
    asking = Asking()
    asking.post(pool, 1)
    time.sleep(0.05)  # past the time for which threads spin
    assert not asking.out.any() and int(asking.done[0]) == 0
    asked_ns = time.perf_counter_ns()
    asking.ask[0] = 1
    asking.await_done(1)
    assert asking.out.equal(asking.expected(pool))
    begun_ns, ended_ns = asking.times.tolist()
    assert asked_ns <= begun_ns < ended_ns <= time.perf_counter_ns()


def test_new_keys_and_values_are_written_to_their_places_first(pool: HostPool) -> None:
    asking = Asking()
    keys, values = asking.layers.held[0]
    table = asking.layers.tables
    places = (table.pages[:, 599 // table.page_tokens] * table.page_tokens + 599 % table.page_tokens).contiguous()
    new = torch.randn(2, 3, KV_HEADS, DIM).to(keys.dtype)
    asking.post(pool, 1, (new[0], new[1], places))
    asking.ask[0] = 1
    asking.await_done(1)
    assert keys[places].equal(new[0]) and values[places].equal(new[1])
    assert asking.out.equal(asking.expected(pool))


def test_turns_go_on_from_the_largest_number_to_the_least(pool: HostPool) -> None:
    asking = Asking()
    asking.ask[0] = LAST - 1
    for turn in (LAST, -LAST - 1, -LAST):
        asking.post(pool, turn)
        time.sleep(0.001)
        assert int(asking.done[0]) != turn
        asking.ask[0] = turn
        asking.await_done(turn)
    assert asking.out.equal(asking.expected(pool))


def test_many_wait_in_turn_and_a_pool_that_closes_lets_go_of_what_nobody_asked_for() -> None:
    asking = Asking()
    with HostPool(2) as pool:
        for turn in range(1, 41):
            asking.post(pool, turn)
        asking.ask[0] = 40
        asking.await_done(40)
        assert asking.out.equal(asking.expected(pool))
        asking.times.zero_()
        asking.post(pool, 41)
    assert int(asking.done[0]) == 41, "a card that waits for it would wait for ever"
    assert not asking.times.any(), "nothing was computed"


def test_threads_that_come_late_do_not_wait_for_a_word_that_is_gone() -> None:
    """Of eight threads on fewer cores some come when the others are through."""
    asking, longer = Asking(), KvLayers(6, 2048, torch.zeros(64 << 20, dtype=torch.uint8))
    with HostPool(8, cores=[min(allowed_cores())] * 8) as pool:
        for _ in range(20):
            asking.post(pool, 1)
            asking.ask[0] = 1
            asking.await_done(1)
            asking.ask[0] = asking.done[0] = 0
        waiting = threading.Thread(target=lambda: longer.attention_gbps(pool, 0.0), daemon=True)  # of more memory: all threads leave first
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive(), "a thread waits for a word that nobody will write again"


def test_nothing_is_asked_of_a_pool_whose_caller_computes() -> None:
    with HostPool(1, joined=True) as pool, pytest.raises(ValueError, match="whose caller computes"):
        Asking().post(pool, 1)
