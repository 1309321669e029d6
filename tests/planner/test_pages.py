"""The page size of KV that is kept: chosen from the curves, and the choice explained."""

from dataclasses import replace

import pytest

from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.prices.sizes import kv_page_bytes
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.solver.terms.page_menu import PageCost, candidates, page_menu, told
from tests.planner.small import gpu, machine, model, work

KEEPING = work(prompt_tokens=8192, shared_prefix_tokens=6000, kept_tokens=6000)


def chosen(hardware, m, w, force=None):
    (choice,) = page_menu(hardware, m, w, force or Force(), 1)
    return choice.page_tokens


@pytest.mark.parametrize("kv_width, sizes", [(64, [64, 128, 256, 512]), (256, [512]), (1024, [128, 256, 512]), (4096, [64, 128, 256, 512])])
def test_a_layer_of_a_page_is_whole_blocks_and_half_a_megabyte_where_a_page_can_be(kv_width, sizes):
    m = replace(model(), kv_width=kv_width)
    assert candidates(m) == sizes
    parts = [kv_page_bytes(m, t) for t in candidates(m)]
    assert all(part % ALIGN == 0 for part in parts)
    assert min(parts) >= LIMITS.layer_read_bytes or max(parts) < LIMITS.layer_read_bytes


def test_widths_that_fill_no_block_leave_out_the_pages_that_would_not_align():
    assert candidates(replace(model(), kv_width=8)) == [128, 256, 512]


@pytest.mark.parametrize("hardware", [machine(), machine(vram=0)])
@pytest.mark.parametrize("prefix", [100, 700, 6000])
def test_the_size_is_the_one_whose_prefixes_come_back_soonest(hardware, prefix):
    m, w = replace(model(), kv_width=4096), replace(KEEPING, shared_prefix_tokens=prefix)
    best = chosen(hardware, m, w)
    assert all(PageCost.of(hardware, m, w, best).seconds <= PageCost.of(hardware, m, w, t).seconds for t in candidates(m))


def test_links_that_are_slow_with_small_copies_want_large_pages_and_slow_compute_small_ones():
    m = replace(model(4), kv_width=4096)
    slow_start = gpu(h2d=Curve(((2**22, 0.01), (2**26, 55.0))), dense_tflops=1e5, attention_tflops=1e5, memory_gbps=1e5)
    assert chosen(machine(gpu=slow_start), m, KEEPING) == 512
    assert chosen(machine(gpu=gpu(dense_tflops=1.0, memory_gbps=100.0)), m, KEEPING) == 64


def test_a_forced_size_stays_and_without_a_set_to_keep_the_least_waste_decides():
    m = replace(model(), kv_width=4096)
    assert chosen(machine(), m, KEEPING, Force(page_tokens=16)) == 16
    exact = work(prompt_tokens=8000, new_tokens=192, shared_prefix_tokens=6000)
    assert chosen(machine(), m, exact) == 512
    assert chosen(machine(), m, replace(exact, new_tokens=193)) == 16


def test_the_choice_is_told_with_its_rates_and_what_others_would_cost():
    m = replace(model(), kv_width=1024)
    said = told(machine(), m, KEEPING, 128, False)
    assert said.startswith("KV pages of 128 tokens: 4.19 MB, 524 kB a layer, copied at 47")
    assert "of 55 GB/s" in said and "in pages of 256" in said and "in pages of 512" in said and "\n" not in said
    assert told(machine(vram=0), m, KEEPING, 256, True).endswith("; the size was forced")
    assert "copied" not in told(machine(vram=0), m, KEEPING, 256, True)
