"""Rows that are a thread's own, which it reads ahead while it waits: results are those of threads that have none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from penstock.planner.common.threads import thread_cache_bytes
from penstock.planner.contract.given.formats import KNOWN_FORMATS, in_rows
from penstock.runtime.beside.host_ffn import HostFfn
from penstock.runtime.beside.host_library import kinds_read_ahead, matrix_kinds, products_unbuilt
from penstock.runtime.beside.host_matrix import host_matrix_of
from penstock.runtime.beside.host_pool import HostPool, pool_here
from penstock.runtime.beside.host_serve import flags
from tests.runtime.beside.coded_matrices import coded_matrices
from tests.runtime.beside.test_host_products import matrix_of, normal

pytestmark = pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler here")
HIDDEN, MIDDLE, HANGS_S = 1024, 4096, 20.0
AHEAD = (1 << 17, 1 << 19, 1 << 24)
"""Rows of some matrices; of all; and more than half of all. Fewer than are claimed at once are no thread's own."""


@pytest.fixture(scope="module")
def pools() -> Iterator[list[HostPool]]:
    """The first reads nothing ahead."""
    with ExitStack() as stack:
        yield [stack.enter_context(HostPool(3, ahead_bytes=nbytes)) for nbytes in (0, *AHEAD)]


def units() -> list[HostFfn]:
    torch.manual_seed(1)
    gate, up, down = normal(MIDDLE, HIDDEN) / 32, normal(MIDDLE, HIDDEN) / 32, normal(HIDDEN, MIDDLE) / 64
    return [HostFfn(matrix_of(gate), matrix_of(up), matrix_of(down)), HostFfn(None, matrix_of(up), matrix_of(down))]


@pytest.mark.parametrize("rows", [1, 5])
def test_an_ffn_has_the_same_bits(pools: list[HostPool], rows: int) -> None:
    x = normal(rows, HIDDEN)
    for unit in units():
        first, *others = (torch.empty(rows, HIDDEN, dtype=torch.bfloat16) for _ in pools)
        for pool, out in zip(pools, (first, *others), strict=True):
            pool.ffn(unit, x, out)
        assert first.any() and all(torch.equal(first, out) for out in others)


def test_a_product_has_the_same_bits_in_every_format(pools: list[HostPool]) -> None:
    """Also where a format's rows do not lie side by side, and none is read ahead."""
    torch.manual_seed(3)
    x = normal(1, 768)
    for name, (form, parts) in coded_matrices(2048, 768).items():
        matrix = host_matrix_of(form, parts)
        assert matrix is not None, name
        made = [torch.empty(1, 2048, dtype=torch.bfloat16) for _ in pools]
        for pool, out in zip(pools, made, strict=True):
            pool.product(matrix, x, out)
        assert all(torch.equal(made[0].view(torch.int16), out.view(torch.int16)) for out in made[1:]), name


def test_each_row_is_done_once_where_threads_come_late() -> None:
    """Of so many on a few cores: their own rows are done by others, who may begin with them at the same time as they do."""
    unit, x = units()[0], normal(1, HIDDEN)
    expected, out = torch.empty(2, 1, HIDDEN, dtype=torch.bfloat16)
    with HostPool(1, ahead_bytes=0) as alone:
        alone.ffn(unit, x, expected)
    with HostPool(24, ahead_bytes=1 << 24) as crowd:
        for _ in range(30):
            crowd.ffn(unit, x, out.zero_())
            assert torch.equal(out, expected)


def test_what_is_asked_after_a_while_is_what_is_asked_at_once(pools: list[HostPool]) -> None:
    served, x = units(), normal(1, HIDDEN)
    expected = [torch.empty(1, HIDDEN, dtype=torch.bfloat16) for _ in served]
    for unit, out in zip(served, expected, strict=True):
        pools[0].ffn(unit, x, out)
    for pool in pools:
        ask, done, y = flags(2), flags(2), torch.zeros(HIDDEN).bfloat16()
        with pool.serve(served, 1, HIDDEN, ask, done, x.flatten(), y) as serve:
            for gap_s in (0.002, 0.0, 0.03):
                serve.begin_step()
                for number in range(len(served)):
                    time.sleep(gap_s)
                    ask[number, 0] = 1
                    end = time.monotonic() + HANGS_S
                    while not done[number, 0]:
                        assert time.monotonic() < end, "the unit is done"
                    done[number, 0] = 0
                    assert torch.equal(y.view(1, -1), expected[number])
                while not serve.ended:
                    pass


def test_a_run_reads_as_much_ahead_as_its_plan_says_and_others_half_of_a_threads_cache() -> None:
    with pool_here(1, 12345) as planned, HostPool(1) as usual:
        assert planned.ahead_bytes == 12345 and usual.ahead_bytes == thread_cache_bytes() // 2


def test_what_plans_count_on_is_what_is_read_ahead() -> None:
    """Of every kind but those that lie across rows."""
    across = {name.partition("-")[0] for name, form in KNOWN_FORMATS.items() if in_rows(form) is not None}
    assert across == {"AWQ", "GPTQ4", "GPTQ8"} and set(matrix_kinds()) - kinds_read_ahead() == across & set(matrix_kinds())
