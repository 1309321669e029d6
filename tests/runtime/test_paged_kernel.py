"""The kernels over page tables compute what attention is defined as: the CPU's own, and Triton's, whose interpreter plays the card."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.runtime.beside.host_library import Level, machine_level, products_unbuilt
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.kv.attention.kernel_shape import KernelShape
from penstock.runtime.kv.attention.page_tables import PagedKernel, PageTables, Traits, slots_of
from penstock.runtime.kv.attention.paged_host import HostKernel
from penstock.runtime.kv.attention.paged_kernel import open_kernel
from penstock.runtime.kv.attention.row_groups import packed
from penstock.runtime.kv.batch.token_shape import Pair, TokenShape
from penstock.runtime.model.rows import Row, RowKind, Step

PAGE_TOKENS, SLOTS = 16, 60
SHAPES = [(4, 1, 80, 48), (2, 2, 512, 512), (20, 1, 16, 16)]
"""Query heads, heads, and the dimensions of K and V."""


def traits_of(heads: int, dim: int) -> dict[str, Traits]:
    torch.manual_seed(heads)
    return {
        "plain": Traits(dim**-0.5, None, None, None, None),
        "a window": Traits(dim**-0.5, 9, None, None, None),
        "softcap, sinks and a window": Traits(0.2, 40, 5.0, torch.randn(heads), None),
        "ALiBi": Traits(dim**-0.5, None, None, None, torch.rand(heads)),
    }


def by_definition(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, row: Row, traits: Traits) -> torch.Tensor:
    """[tokens, heads, dim] of one row, in float32: softmax(scores) V."""
    slots = [row.pages[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS for t in range(row.end)]
    group = query.shape[1] // keys.shape[1]
    k, v = (states[slots].float().repeat_interleave(group, 1) for states in (keys, values))
    scores = torch.einsum("thd,nhd->htn", query.float(), k) * traits.scaling
    if traits.softcap:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    position, key = torch.arange(row.start, row.end)[:, None], torch.arange(row.end)[None]
    if traits.slopes is not None:
        scores = scores + traits.slopes[:, None, None] * (key - position)
    seen = key <= position
    if traits.window:
        seen &= key > position - traits.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if traits.sinks is not None:
        scores = torch.cat([scores, traits.sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    return torch.einsum("htn,nhd->thd", scores.softmax(-1)[..., : row.end], v)


def worst_error(kernel: PagedKernel, shape: tuple[int, int, int, int], dtype: torch.dtype, most_tokens: int, card: bool = True) -> float:
    """Of three rows of any lengths in any pages, relative to the largest value, over all traits. A card's kernel writes and repeats."""
    query_heads, heads, dim, value_dim = shape
    made, worst = random.Random(most_tokens), 0.0
    for name, traits in traits_of(query_heads, dim).items():
        free = made.sample(range(SLOTS), SLOTS)
        rows = []
        for k in range(3):
            end = made.randrange(1, 120) if k else 300
            count = made.randint(1, min(end, most_tokens))
            rows.append(Row(k, (0,) * count, end - count, tuple(free.pop() for _ in range(-(-end // PAGE_TOKENS))), RowKind.verify))
        step, held = Step(tuple(rows)), TokenShape((heads, dim), (heads, value_dim), dtype)
        keys, values = held.pair(torch.empty(SLOTS * PAGE_TOKENS * held.nbytes, dtype=torch.uint8))
        keys.copy_(torch.randn(keys.shape))
        values.copy_(torch.randn(values.shape))
        if card and name == "plain" and not writes_as_told(kernel, (keys, values), slots_of(step, PAGE_TOKENS, torch.tensor)):
            return float("inf")
        query = torch.randn(query_heads, step.tokens, dim).to(dtype).transpose(0, 1)
        out = torch.empty(step.tokens, query_heads, value_dim, dtype=dtype)
        tables = PageTables.of(packed(step), PAGE_TOKENS, torch.tensor)
        assert kernel.takes(query, held)
        kernel.attend(query, (keys, values), tables, traits, out)
        if card and not repeats_the_last(kernel, query, (keys, values), step, traits, out):
            return float("inf")
        for at in packed(step):
            want = by_definition(query[at.first : at.first + len(at.row.tokens)], keys, values, at.row, traits)
            error = (out[at.first : at.first + len(want)].float() - want).abs().max() / want.abs().max().clamp(min=1)
            worst = max(worst, error.item())
    return worst


def repeats_the_last(kernel: PagedKernel, query: torch.Tensor, held: Pair, step: Step, traits: Traits, made: torch.Tensor) -> bool:
    """Whether rows that have their last token three times more say with it what it says, and with the others what they ``made``."""
    every = [at.first + min(k, len(at.row.tokens) - 1) for at in packed(step) for k in range(len(at.row.tokens) + 3)]
    told = PageTables.of(packed(step), PAGE_TOKENS, torch.tensor)
    firsts, counts = told.firsts + 3 * torch.arange(len(step.rows)), told.counts + 3
    tables = replace(told, firsts=firsts, counts=counts, most_tokens=told.most_tokens + 3)
    out = torch.empty(len(every), *made.shape[1:], dtype=made.dtype)
    kernel.attend(query[every], held, tables, traits, out)
    return bool(torch.allclose(out.float(), made[every].float(), atol=2e-3 if made.dtype == torch.float16 else 1e-5, rtol=1e-3))


def writes_as_told(kernel: PagedKernel, held: Pair, slots: torch.Tensor) -> bool:
    """Whether new K and V lie in ``slots`` once they are written, and nothing else has changed."""
    new = tuple(torch.randn(1, len(slots), *states.shape[1:]).to(states.dtype).transpose(1, 2) for states in held)
    want = [states.index_copy(0, slots, one[0].transpose(0, 1)) for states, one in zip(held, new, strict=True)]
    return kernel.write(held, new, slots) and all(map(torch.equal, held, want))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_any_lengths_in_any_pages_are_attention_by_definition(shape: tuple[int, int, int, int]) -> None:
    """Decode rows and tails, whole and with their keys split among programs. Triton reads its mode when it is imported."""
    pytest.importorskip("triton", reason="needs Triton")
    command, environment = [sys.executable, __file__, json.dumps(shape)], {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    errors = json.loads(ran.stdout.splitlines()[-1])
    assert all(error < 2e-5 for error in errors["float32"]) and all(error < 3e-3 for error in errors["float16"]), errors


@pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler here")
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("shape", [*SHAPES, (12, 4, 128, 128)], ids=str)
def test_the_cpu_attends_by_definition_whatever_its_instructions_and_threads(shape: tuple[int, int, int, int], level: int) -> None:
    """Decode rows and tails; a row of 300 keys has two spans."""
    if machine_level() < level:
        pytest.skip(f"this machine has no {Level(level).name}")
    for threads, joined in ((1, True), (3, True), (2, False)):
        with HostPool(threads, level=Level(level), joined=joined) as pool:
            for most_tokens in (1, 16):
                assert worst_error(HostKernel(pool), shape, torch.bfloat16, most_tokens, card=False) < 2**-8


@pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler here")
def test_dimensions_and_numbers_that_the_cpu_has_no_code_for_are_torchs() -> None:
    with HostPool(1, joined=True) as pool:
        kernel, shape = HostKernel(pool), TokenShape((2, 24), (2, 16), torch.bfloat16)
        assert not kernel.takes(torch.zeros(1, 4, 24).bfloat16(), shape)
        assert not kernel.takes(torch.zeros(1, 4, 16).half(), TokenShape((2, 16), (2, 16), torch.float16))


@pytest.mark.parametrize("tokens", [1, 5, 64, 4096])
@pytest.mark.parametrize("rows", [1, 2, 31])
def test_what_splits_leave_is_little_however_long_rows_are(rows: int, tokens: int) -> None:
    """A card of 132 processors; 8 K heads with 4 query heads each, dimensions of 128: 8.7 MB of float32."""
    held = [Row(k, (0,) * tokens, 4096, tuple(range(512)), RowKind.verify) for k in range(rows)]
    tables = PageTables.of(packed(Step(tuple(held))), PAGE_TOKENS, torch.tensor)
    shape = KernelShape.of(tables, 8, 4, (128, 128), None, 132)
    assert shape.partial_sums(rows, tokens, 32) <= 2 * 132 * shape.lines <= 2 * 132 * 64
    assert bool(shape.partial_sums(rows, tokens, 32)) is (shape.splits > 1)


def test_there_is_none_without_a_card_or_a_pool() -> None:
    assert open_kernel(torch.device("cpu")) is None


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    import penstock.runtime.kv.attention.kernel_shape as kernel_shape
    import penstock.runtime.kv.attention.paged_triton as paged_triton

    kernel_shape._LEAST_KEYS = 32  # so that these short rows are split, too
    kernels = {count: paged_triton.TritonKernel(count) for count in (1, 4096)}
    shape, cases = tuple(json.loads(sys.argv[1])), [(1, 4096), (20, 1)]
    types = {"float32": torch.float32, "float16": torch.float16}
    print(json.dumps({name: [worst_error(kernels[count], shape, dtype, most) for most, count in cases] for name, dtype in types.items()}))
