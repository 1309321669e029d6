"""Products on the CPU equal torch's within the order of summation, at every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from penstock.planner.common.threads import most_threads
from penstock.runtime.beside.host_ffn import HostFfn, host_linear
from penstock.runtime.beside.host_library import Level, machine_level, products_unbuilt
from penstock.runtime.beside.host_matrix import HostMatrix, host_matrix_of
from penstock.runtime.beside.host_pool import HostPool, UnitRows, pool_here

pytestmark = pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler here")
LEVELS = [] if products_unbuilt() else [level for level in Level if level <= machine_level()]


@pytest.fixture(params=LEVELS, ids=lambda level: level.name, scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[HostPool]:
    with HostPool(3, level=request.param) as made:
        yield made


def matrix_of(weight: torch.Tensor, name: str = "BF16") -> HostMatrix:
    made = host_matrix_of(name, {"weight": weight})
    assert made is not None
    return made


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("name", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    ("rows", "outputs", "columns"), [(1, 37, 1100), (2, 16, 64), (3, 50, 33), (7, 5, 2049), (16, 48, 256), (21, 70, 95)]
)
def test_a_product_is_the_sum_in_double_precision(pool: HostPool, name: str, rows: int, outputs: int, columns: int) -> None:
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[name]
    weight, x, out = normal(outputs, columns, dtype=dtype), normal(rows, columns), torch.empty(rows, outputs, dtype=torch.bfloat16)
    pool.product(matrix_of(weight, name), x, out)
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + size * 2**-22).all()


STEPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""How far apart neighbouring numbers are, relative to them."""


@pytest.mark.parametrize("name", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    ("rows", "outputs", "columns"), [(1, 37, 1100), (2, 16, 64), (3, 50, 33), (7, 5, 2049), (16, 48, 256), (21, 70, 95)]
)
def test_a_product_of_f16_is_the_sum_in_double_precision(pool: HostPool, name: str, rows: int, outputs: int, columns: int) -> None:
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[name]
    weight, x = normal(outputs, columns, dtype=dtype), normal(rows, columns, dtype=torch.float16)
    out = torch.empty(rows, outputs, dtype=torch.float16)
    pool.product(matrix_of(weight, name), x, out)
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-11 + size * 2**-22).all()


def test_rows_of_a_product_do_not_depend_on_their_neighbours(pool: HostPool) -> None:
    weight, x = normal(40, 1500), normal(16, 1500)
    matrix = matrix_of(weight)
    together, alone = torch.empty(16, 40, dtype=torch.bfloat16), torch.empty(1, 40, dtype=torch.bfloat16)
    pool.product(matrix, x, together)
    pool.product(matrix, x[5:6].contiguous(), alone)
    assert (together[5:6].float() - alone.float()).abs().max() <= alone.float().abs().max() * 2**-7


ACTS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@pytest.mark.parametrize("activation", ACTS)
@pytest.mark.parametrize("dtype", STEPS, ids=str)
@pytest.mark.parametrize(("rows", "gated", "biased"), [(1, True, False), (5, True, True), (2, False, True)])
def test_an_ffn_rounds_where_torch_rounds(
    pool: HostPool, activation: str, dtype: torch.dtype, rows: int, gated: bool, biased: bool
) -> None:
    hidden, middle, name = 96, 160, {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    shapes = ((middle, hidden), 8), ((middle, hidden + 0), 7), ((hidden, middle), 10)
    gate, up, down = (normal(*shape, dtype=dtype) / size for shape, size in shapes)
    biases = tuple(normal(size, 1, dtype=dtype).flatten() if biased else None for size in (middle, middle, hidden))
    if not gated:
        biases = (None, *biases[1:])
    x, out = normal(rows, hidden, dtype=dtype), torch.empty(rows, hidden, dtype=dtype)
    matrices = (matrix_of(gate, name) if gated else None, matrix_of(up, name), matrix_of(down, name))
    pool.ffn(HostFfn(*matrices, activation, biases, dtype=dtype), x, out)
    act, above = ACTS[activation], functional.linear(x, up, biases[1])
    inner = act(functional.linear(x, gate, biases[0])) * above if gated else act(above)
    expected = functional.linear(inner, down, biases[2])
    assert (out.float() - expected.float()).abs().max() <= 4 * STEPS[dtype] * expected.float().abs().max()
    assert (out == expected).float().mean() > 0.8, "most agree to the bit"


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_a_clamped_expert_is_gpt_oss_own(pool: HostPool, rows: int) -> None:
    """Gate and up in turns, biases, both clamped; beside the model's own module in F32, imported here: another file's process imports this
    one for its matrices."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    both, down, x = normal(2 * 48, 64), normal(40, 48), normal(rows, 64)
    biases = normal(2 * 48), normal(40)
    out = torch.empty(rows, 40, dtype=torch.bfloat16)
    pool.ffn(HostFfn(None, matrix_of(both), matrix_of(down), biases=(None, *biases), clamp=(1.702, 7.0)), x, out)
    made = functional.linear(x.float(), both.float(), biases[0].float())
    gated = GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), made)
    want = functional.linear(gated, down.float(), biases[1].float())
    assert made.abs().max() > 7 and (out.float() - want).abs().max() <= want.abs().max() * 2**-6


def test_started_units_are_done_in_their_order(pool: HostPool) -> None:
    weight = normal(64, 64) / 8
    chain = [normal(1, 64), *(torch.empty(1, 64, dtype=torch.bfloat16) for _ in range(100))]
    unit = HostFfn(None, None, matrix_of(weight))
    before = pool.told()
    tickets = [pool.start(unit, UnitRows.of(x, out)) for x, out in zip(chain, chain[1:], strict=False)]
    for ticket in tickets[::-1]:
        pool.wait(ticket)
    again = [torch.empty_like(chain[0]) for _ in chain[1:]]
    for x, out in zip(chain, again, strict=False):
        pool.ffn(unit, x, out)
    assert all(torch.equal(one, other) for one, other in zip(chain[1:], again, strict=True))
    assert pool.told().bytes - before.bytes == 200 * weight.nbytes
    assert pool.told().busy_s > before.busy_s


def test_biases_are_read_where_they_lie() -> None:
    bias = normal(24)
    unit = HostFfn(None, None, matrix_of(normal(24, 64)), biases=(None, None, bias))
    assert unit.in_c().bias[2] == bias.data_ptr()


def test_a_pool_refuses_what_is_no_plain_memory(pool: HostPool) -> None:
    matrix = matrix_of(normal(8, 16))
    out = torch.empty(2, 8, dtype=torch.bfloat16)
    for x in (torch.zeros(2, 16), torch.zeros(2, 17, dtype=torch.bfloat16), torch.zeros(16, 2, dtype=torch.bfloat16).T):
        with pytest.raises(ValueError, match="plain|rows of 17"):
            pool.product(matrix, x, out)
    with pytest.raises(ValueError, match="input rows of torch.float16 for output rows of torch.bfloat16"):
        pool.product(matrix, torch.zeros(2, 16, dtype=torch.float16), out)
    with pytest.raises(ValueError, match="rows of torch.bfloat16, where the layer computes with torch.float16"):
        pool.ffn(host_linear(matrix, dtype=torch.float16), torch.zeros(2, 16, dtype=torch.bfloat16), out)
    with pytest.raises(ValueError, match="3 input rows for 2"):
        pool.product(matrix, torch.zeros(3, 16, dtype=torch.bfloat16), out)


def test_an_ffn_refuses_layers_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="down takes 7 columns, up gives 8"):
        HostFfn(None, matrix_of(normal(8, 16)), matrix_of(normal(16, 7)))
    with pytest.raises(ValueError, match="no activation tanh; there are silu"):
        HostFfn(None, matrix_of(normal(8, 16)), matrix_of(normal(16, 8)), "tanh")


def test_a_closed_pool_says_so() -> None:
    made = HostPool(1)
    made.close()
    made.close()
    with pytest.raises(ValueError, match="closed"):
        made.near()


def test_reading_counts_whole_pages(pool: HostPool) -> None:
    before = pool.told().bytes
    pool.read(torch.zeros(5 * 4096, dtype=torch.uint8))
    assert pool.told().bytes - before == 5 * 4096


@pytest.mark.parametrize(("said", "most"), [("default", Level.portable), ("avx2", Level.avx2), ("avx512", Level.avx512)])
def test_what_holds_torch_back_holds_products_back(said: str, most: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_level()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", said)
    assert machine_level() is min(machine, most)
    with HostPool(1) as made:
        assert made.told().level is min(machine, most)


def test_a_plan_of_a_larger_machine_gets_the_threads_that_are_here() -> None:
    """And the user is told that they are fewer, where they are."""
    told: list[str] = []
    with pool_here(256, 0, told.append) as made:
        assert made.threads == most_threads()
    assert len(told) == 1 and told[0].startswith(f"{most_threads()} of 256 threads: ")
    with pool_here(1, 0, told.append) as made:
        assert made.threads == 1
    assert len(told) == 1


def test_a_caller_that_joins_gets_the_same_bits_and_starts_nothing(pool: HostPool) -> None:
    torch.manual_seed(5)
    weight, x = torch.randn(300, 130).bfloat16(), torch.randn(3, 130).bfloat16()
    want, memory = torch.empty(3, 300, dtype=torch.bfloat16), torch.zeros(10 * 4096, dtype=torch.uint8)
    matrix = host_matrix_of("BF16", {"weight": weight})
    assert matrix is not None
    pool.product(matrix, x, want)
    level = pool.told().level
    for threads in (1, 3):
        with HostPool(threads, level=level, joined=True) as joined:
            for _ in range(100):  # more than there is room for at once
                made = torch.empty_like(want)
                joined.product(matrix, x, made)
                assert torch.equal(made, want)
            joined.read(memory)
            assert joined.told().bytes == 100 * matrix.bytes + memory.nbytes
            with pytest.raises(ValueError, match="nothing is started"):
                joined.start(host_linear(matrix), x, want)
