"""Decoders timed for `planner probe`: what they are given has each format's size, and what they say becomes figures."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from typing import Any

import pytest
import torch

from penstock.planner.contract.given.formats import KNOWN_FORMATS
from penstock.planner.probe.findings import CannotMeasure
from penstock.planner.probe.runtime_rates import measure_decoders
from penstock.runtime.beside.host_library import products_unbuilt
from penstock.runtime.formats.codings import CODINGS
from penstock.runtime.timed import host_product_times
from penstock.runtime.timed.decoder_times import COLUMNS, Stretch, parts_of, rates, samples
from penstock.runtime.timed.host_product_times import units_of

ROWS = 128


@pytest.mark.parametrize("name", samples(ROWS))
def test_a_sample_has_the_bytes_of_its_format_and_is_decoded(name: str) -> None:
    parts = parts_of(samples(ROWS)[name], torch.device("cpu"))
    planned = KNOWN_FORMATS[name].stored_bytes(ROWS, COLUMNS)
    assert sum(part.nbytes for part in parts.values()) == pytest.approx(planned, rel=0.03)
    out = torch.full((ROWS, COLUMNS), torch.nan, dtype=torch.bfloat16)
    CODINGS[name].decode(parts, out)
    assert not out.isnan().any()


def test_scales_of_mxfp4_are_one() -> None:
    """Else a CPU multiplies numbers without a leading one, and is timed at two thirds of its rate."""
    parts = parts_of(samples(ROWS)["MXFP4"], torch.device("cpu"))
    decoded = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
    CODINGS["MXFP4"].decode(parts, decoded)
    assert set(decoded.abs().unique().tolist()) <= {0, 0.5, 1, 1.5, 2, 3, 4, 6}


def test_matrices_that_take_turns_share_no_bytes_of_their_largest_part() -> None:
    shapes = samples(ROWS)["INT4-128"]
    stretch = Stretch(1 << 20)
    matrices = stretch.matrices(shapes)
    start, size = stretch.memory.data_ptr(), matrices[0]["weight_packed"].nbytes
    places = sorted(matrix["weight_packed"].data_ptr() - start for matrix in matrices)
    assert len(places) == stretch.memory.nbytes // size > 1 and all(b - a >= size for a, b in pairwise(places))
    assert places[-1] + size <= stretch.memory.nbytes and stretch.matrices(shapes)[0]["weight_packed"].data_ptr() == start
    with pytest.raises(IndexError, match="no room"):
        stretch.cut(shapes)


def test_large_parts_of_random_bits_are_cut_too() -> None:
    """Drawn for each matrix, those of the lossless form took longer than all that was measured."""
    shapes = samples(1024)["lossless"]
    stretch = Stretch(16 << 20)
    first, second = stretch.matrices(shapes)
    inside = range(stretch.memory.data_ptr(), stretch.memory.data_ptr() + stretch.memory.nbytes)
    for matrix in (first, second):
        assert {leaf for leaf, part in matrix.items() if part.data_ptr() in inside} == {"low", "codes"}
    assert second["low"].data_ptr() >= first["codes"].data_ptr() + first["codes"].nbytes


def test_units_go_on_where_the_last_number_of_rows_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first one again a slow format would be timed over what the cache has just read."""
    seen: list[int] = []
    monkeypatch.setattr(host_product_times, "unit_gbps", lambda pool, turn, rows, seconds: float(seen.append(next(turn)) or 1))
    host_product_times.by_rows(None, [0, 1, 2], 0.0)  # type: ignore[arg-type, list-item]
    assert seen == [0, 1, 2, 0, 1]


@pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler made the CPU's products")
@pytest.mark.parametrize("name", ["BF16", *samples(ROWS)])
def test_units_of_the_cpu_are_cut_from_memory_that_is_filled_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_product_times, "MATRIX_ROWS", 512)
    monkeypatch.setattr(host_product_times, "COLUMNS", 256)
    stretch = Stretch(4 << 20)
    units = units_of(name, stretch)
    assert len(units) > 1 and sum(unit.bytes for unit in units) >= 0.5 * (4 << 20)


class Link:
    """Copies that get what a bus of 130 GB/s has left."""

    read_gbps = 0.0

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None: ...

    def gbps_within(self, start: float, end: float) -> float:
        return min(55.0, 130.0 - self.read_gbps)


@pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler made the CPU's products")
@pytest.mark.parametrize(("each_gbps", "wanted"), [(3.0, 2), (40.0, 2), (73.0, 1), (90.0, 1)])
def test_more_threads_are_for_formats_that_leave_the_bus_room(each_gbps: float, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reads so much, two twice that, as far as the bus has it."""

    def read(pool: host_product_times.HostPool, *_: object) -> float:
        Link.read_gbps = min(pool.threads * each_gbps, 75.0 if each_gbps < 80 else 130.0)
        return Link.read_gbps

    monkeypatch.setattr(host_product_times, "unit_gbps", read)
    assert host_product_times.wanted_threads([], 1, 2, 0.0, Link) == wanted
    assert host_product_times.wanted_threads([], 2, 2, 0.0, Link) == 2


def test_every_format_that_runs_is_timed_or_one_of_its_family() -> None:
    families = {name.partition("-")[0] for name in samples(ROWS)}
    assert {name.partition("-")[0].replace("GPTQ8", "GPTQ4") for name in CODINGS if KNOWN_FORMATS[name].needs_scratch} <= families


def test_the_rates_of_a_cpu_are_of_decoding_and_of_its_own_products() -> None:
    found = rates(torch.device("cpu"), 0.0, ROWS)
    assert found["decode"].keys() == samples(ROWS).keys() and min(found["decode"].values()) >= 0
    assert found["products"].keys() == {name for name in samples(ROWS) if KNOWN_FORMATS[name].host_rows and products_unbuilt() is None}


def said(monkeypatch: pytest.MonkeyPatch, status: int, out: str, err: str = "") -> list[list[str]]:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, status, out, err)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_a_probe_has_the_figures_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"cpu": {"decode": {"FP8": 1.0}, "products": {"FP8": 9.0}}, "cuda": {"decode": {"FP8": 900.0}, "products": {"FP8": 2000.0}}}
    commands = said(monkeypatch, 0, "a warning\n" + json.dumps(told) + "\n")
    figures = {figure.path: figure.value for figure in measure_decoders(2.0, 512, 8, 1)}
    assert figures == {
        "cpu.decode": {"FP8": 1.0},
        "cpu.products": {"FP8": 9.0},
        "gpu.decode": {"FP8": 900.0},
        "gpu.products": {"FP8": 2000.0},
    }
    assert commands[0][-4:] == ["seconds=2.0", "rows=512", "threads=8", "gpu=1"]
    assert [figure.path for figure in measure_decoders(2.0, 512, 0, None)] == ["cpu.decode", "cpu.products"]
    said(monkeypatch, 1, "", "Traceback\nImportError: no torch\n")
    with pytest.raises(CannotMeasure, match="ImportError: no torch"):
        list(measure_decoders(2.0, 512, 8, None))
