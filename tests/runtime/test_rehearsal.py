"""What passes are rehearsed for: no kernel over page tables is compiled while a client waits."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.runtime.engine.passes.rehearsal import AnyRows, meet_loose_rows
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.attention.kernel_shape import KernelShape, telling_tokens
from penstock.runtime.kv.attention.page_tables import PageTables, Traits
from penstock.runtime.kv.attention.row_groups import packed
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import kinds
from penstock.runtime.kv.batch.token_shape import Pair, TokenShape
from penstock.runtime.model.rows import Row, RowKind, Step
from tests.runtime.steppers import CPU, PAGE_TOKENS
from tests.support import save_tiny

ROWS, ROW_PAGES, PASS_TOKENS, PROCESSORS = 9, 40, 96, 132


class PlayedKernel:
    """Notes what Triton compiles for, and computes nothing."""

    alone = False

    def __init__(self) -> None:
        self.compiled: set[tuple[object, ...]] = set()

    def takes(self, query: torch.Tensor, shape: TokenShape) -> bool:
        return True

    def attend(self, query: torch.Tensor, held: Pair, tables: PageTables, traits: Traits, out: torch.Tensor) -> None:
        heads, dims = held[0].shape[1], (held[0].shape[2], held[1].shape[2])
        shape = KernelShape.of(tables, heads, query.shape[1] // heads, dims, traits.window, PROCESSORS)
        numbers = (tables.firsts, tables.starts, tables.counts, tables.ends, tables.pages)
        places = tuple(one.storage_offset() * one.element_size() % 16 for one in numbers)
        self.compiled.add((shape.lines, shape.keys, shape.whole, places))
        out.zero_()

    def write(self, held: Pair, new: Pair, slots: torch.Tensor) -> bool:
        return False


@pytest.fixture(scope="module", params=[4, 2, 1], ids=["no groups", "groups of 2", "groups of 4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    checkpoint = save_tiny(tmp_path_factory.mktemp("model"), layers=1, num_key_value_heads=request.param)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()


def any_pass(chance: random.Random) -> Step:
    """Of a server: rows that decode or verify, and parts of prompts, in adjacent pages or not."""
    free, rows, room = list(range(ROWS * ROW_PAGES)), [], PASS_TOKENS
    for number in range(chance.randint(1, ROWS)):
        kind = chance.choice((RowKind.decode, RowKind.decode, RowKind.verify, RowKind.prompt))
        count = {RowKind.decode: 1, RowKind.verify: chance.randint(2, 9), RowKind.prompt: chance.randint(1, PASS_TOKENS)}[kind]
        start = chance.choice((0, chance.randrange(1, 60), chance.randrange(1, ROW_PAGES * PAGE_TOKENS - count)))
        needed = -(-(start + count) // PAGE_TOKENS)
        pages, free = free[:needed], free[needed:]
        if chance.random() < 0.4:
            chance.shuffle(pages)
        if count <= room:
            room -= count
            rows.append(Row(number, (0,) * count, start, tuple(pages), kind, 1))
    return Step(tuple(rows))


def test_no_pass_of_a_server_has_a_kernel_that_was_not_met(model: PreTrainedModel) -> None:
    kernel, chance = PlayedKernel(), random.Random(3)
    stepper = Stepper(model, CPU, KvPool(ROWS * ROW_PAGES, PAGE_TOKENS, kinds(model.config), CPU), kernel=kernel)
    most = ROW_PAGES * PAGE_TOKENS
    meet_loose_rows(stepper, ROWS, most)
    AnyRows(stepper, ROWS, most, PASS_TOKENS, 4).warm_up(torch.zeros(ROWS, 1))
    met, kernel.compiled = kernel.compiled, set()
    assert stepper.pool.pages.free == ROWS * ROW_PAGES
    for _ in range(400):
        stepper.run(any_pass(chance))
    assert {whole for _, _, whole, _ in kernel.compiled} == {True, False}
    assert kernel.compiled <= met


@pytest.mark.parametrize(
    ("group", "dims", "tokens"),
    [(1, (128, 128), {1, 32, 64}), (4, (128, 128), {1, 8, 16}), (8, (64, 64), {1, 4, 8}), (16, (192, 128), {1, 2}), (7, (512, 64), {1})],
)
def test_rows_have_as_many_kernels_as_numbers_of_lines(group: int, dims: tuple[int, int], tokens: set[int]) -> None:
    assert set(telling_tokens(group, dims)) == tokens


@pytest.mark.parametrize("count", range(1, 8))
def test_the_numbers_of_rows_lie_alike_however_many_rows_there_are(count: int) -> None:
    rows = [Row(k, (0,) * (k + 1), 10 * k, tuple(range(9 * k, 9 * k + 9)), RowKind.prompt, 1) for k in range(count)]
    tables = PageTables.of(packed(Step(tuple(rows))), PAGE_TOKENS, torch.tensor)
    numbers = (tables.firsts, tables.starts, tables.counts, tables.ends, tables.pages)
    assert [one.storage_offset() % 2 for one in numbers] == [0] * 5
    assert tables.starts.tolist() == [10 * k for k in range(count)]
    assert tables.counts.tolist() == [k + 1 for k in range(count)]
    assert tables.ends.tolist() == [11 * k + 1 for k in range(count)]
    assert tables.firsts.tolist() == [k * (k + 1) // 2 for k in range(count)]
    assert tables.pages[:, 0].tolist() == [9 * k for k in range(count)]
