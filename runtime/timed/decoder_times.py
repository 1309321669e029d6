"""How fast each format is decoded here, and multiplied as it is stored: `planner probe` runs this as a process of its own.

    python -m penstock.runtime.timed.decoder_times [seconds=4] [rows=2048]

``rows`` of each matrix on the CPU. Takes :func:`uncached_bytes` of DRAM, 256 MiB at least. Ends with one JSON line: for ``cpu`` and,
where there is a card, ``cuda``: ``decode``, format -> 1e9 elements a second into memory, and ``products``, format -> GB/s of stored bytes
by a product of one row, where a run makes such products unasked.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from types import MappingProxyType

import torch

from penstock.planner.common.host_memory import uncached_bytes
from penstock.planner.common.measures import align_up
from penstock.planner.contract.given.formats import KNOWN_FORMATS
from penstock.runtime.beside.host_library import products_unbuilt
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.beside.on_host import OnHost
from penstock.runtime.formats.coding import Coding, Parts
from penstock.runtime.formats.codings import CODINGS
from penstock.runtime.memory.arena import Arena, PageLock

COLUMNS = 4096
ROWS: Mapping[str, int] = MappingProxyType({"cpu": 2048, "cuda": 14336})
"""On a card an FFN matrix of an 8B model; on a CPU, where its seconds are in proportion, a part of one."""
ROTATED = 3
"""Matrices that take turns on a card, so that no cache holds the next one."""
ALIGNED = 64
LEAST_BYTES = 256 << 20
"""Of matrices on a CPU. Decoding is bound by computing more than by memory, and a quick probe has no time to fill more."""
RANDOM_BYTES, LARGE_BYTES = 8 << 20, 1 << 20
"""What matrices of a CPU are made of: so many random bytes, over and over; parts from so many on, none of which is drawn for itself."""
LEAST = 2
AT_ONCE: Mapping[str, int] = MappingProxyType({"cpu": 1, "cuda": 8})
"""Calls that are timed together: those of a card are short beside waiting for it."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
E8M0_ONE = 127
TABLES = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")


def samples(rows: int, columns: int = COLUMNS) -> dict[str, Shapes]:
    """Format -> leaf -> (shape, dtype) of one matrix. What others of its family take is taken to be alike."""
    groups = columns // 128
    blocks = {name: ((rows, KNOWN_FORMATS[name].stored_bytes(1, columns)), torch.uint8) for name in TABLES if name in CODINGS}
    found: dict[str, Shapes] = {
        "FP8": {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale": ((rows // 128, groups), torch.float32)},
        "FP8-row": {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale": ((rows, 1), torch.bfloat16)},
        "MXFP4": {"blocks": ((rows, columns // 32, 16), torch.uint8), "scales": ((rows, columns // 32), torch.uint8)},
        "INT4-128": {"weight_packed": ((rows, columns // 8), torch.int32), "weight_scale": ((rows, groups), torch.bfloat16)},
        "INT8-row": {"weight": ((rows, columns), torch.int8), "weight_scale": ((rows, 1), torch.bfloat16)},
        "GPTQ4-128": {
            "qweight": ((columns // 8, rows), torch.int32),
            "qzeros_less_one": ((groups, rows // 8), torch.int32),
            "scales": ((groups, rows), torch.bfloat16),
        },
        "AWQ-128": {
            "qweight": ((columns, rows // 8), torch.int32),
            "qzeros": ((groups, rows // 8), torch.int32),
            "scales": ((groups, rows), torch.bfloat16),
        },
        "NVFP4": {
            "weight": ((rows, columns // 2), torch.uint8),
            "weight_scale": ((rows, columns // 16), torch.float8_e4m3fn),
            "divisor": ((1,), torch.float32),
        },
        "lossless": {
            "low": ((rows, columns), torch.uint8),
            "codes": ((rows * columns // 128, 64), torch.uint8),
            "exponents": ((16,), torch.uint8),
            "at": ((8,), torch.int32),
            "values": ((8,), torch.bfloat16),
        },
    }
    return found | {name: {"weight": weight} for name, weight in blocks.items()}


def parts_of(shapes: Shapes, device: torch.device) -> dict[str, torch.Tensor]:
    """Ones where there are scales, random bits elsewhere. Of MXFP4 random scales would be so small that what is computed with them has no
    leading one, which takes a CPU several times as long."""
    found = {leaf: _filled(shape, dtype, device) for leaf, (shape, dtype) in shapes.items()}
    if (scales := found.get("scales")) is not None and scales.dtype == torch.uint8:
        scales.fill_(E8M0_ONE)
    return found


def _is_drawn(leaf: str, dtype: torch.dtype) -> bool:
    """Whether :func:`parts_of` has random bits for it."""
    return leaf != "scales" and not _is_wide(dtype)


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if _is_wide(dtype):
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.randint(0, 120, (_nbytes(shape, dtype),), dtype=torch.uint8, device=device).view(dtype).view(shape)


def random_bits() -> torch.Tensor:
    """``RANDOM_BYTES`` as :func:`parts_of` draws them."""
    return torch.randint(0, 120, (RANDOM_BYTES,), dtype=torch.uint8)


class Stretch:
    """A pattern over and over in ``nbytes`` of memory; matrices are cut from it, one behind the other. It lies in large pages where the
    machine has them, as an engine's does. Torch's own lies in small ones on many, which 30 threads read a sixth slower."""

    def __init__(self, nbytes: int):
        """Filled with such random bits as :func:`parts_of` has."""
        self._arena = Arena(align_up(max(2 * RANDOM_BYTES, nbytes), RANDOM_BYTES))
        self.memory = self._arena.tensor[: self._arena.nbytes]
        self._at = 0
        self.fill(random_bits())

    def fill(self, pattern: torch.Tensor) -> None:
        """Anew, with ``RANDOM_BYTES`` of ``pattern``, and from the start."""
        self.memory.view(-1, RANDOM_BYTES).copy_(pattern.view(torch.uint8))
        self._at = 0

    def lock(self, lock: PageLock) -> None:
        """Page-lock it for copies to a card, for as long as the process lives. RuntimeError where not all of it can be."""
        self._arena.lock_pages(lock)
        if self._arena.refused:
            raise RuntimeError(f"{self._arena.nbytes} bytes are not page-locked: {self._arena.refused}")

    def rewind(self) -> Stretch:
        """From the start again."""
        self._at = 0
        return self

    def cut(self, shapes: Shapes) -> Parts:
        """A matrix as :func:`parts_of` makes it, whose largest part lies here, and others of random bits that are large. Raises IndexError
        behind the last that has room."""
        largest = max(shapes, key=lambda leaf: _nbytes(*shapes[leaf]))
        here = [leaf for leaf in shapes if leaf == largest or (_is_drawn(leaf, shapes[leaf][1]) and _nbytes(*shapes[leaf]) >= LARGE_BYTES)]
        placed = {leaf: self._place(*shapes[leaf]) for leaf in here}
        return {**parts_of({leaf: shapes[leaf] for leaf in shapes if leaf not in placed}, self.memory.device), **placed}

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        place = self.memory[self._at : self._at + _nbytes(shape, dtype)]
        if place.nbytes < _nbytes(shape, dtype):
            raise IndexError(f"{self.memory.nbytes} bytes have no room for one more matrix at {self._at}")
        self._at += -(-place.nbytes // ALIGNED) * ALIGNED
        return place.view(dtype).view(shape)

    def matrices(self, shapes: Shapes) -> list[Parts]:
        """As many as have room."""
        self.rewind()
        first = self.cut(shapes)
        return [first, *(self.cut(shapes) for _ in range(self.memory.nbytes // self._at - 1))]


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def seconds_of(work: Callable[[Parts], object], matrices: Sequence[Parts], device: torch.device, share_s: float) -> float:
    """Of ``work`` with one of ``matrices``, the next at every call: the median of at least ``LEAST``."""
    work(matrices[-1])
    took: list[float] = []
    at_once = AT_ONCE[device.type]
    end = time.perf_counter() + share_s
    while len(took) < LEAST or time.perf_counter() < end:
        _wait(device)
        begun = time.perf_counter()
        for turn in range(at_once):
            work(matrices[(len(took) * at_once + turn) % len(matrices)])
        _wait(device)
        took.append((time.perf_counter() - begun) / at_once)
    return median(took)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _multiplying(device: torch.device) -> Iterator[Callable[[str], Coding]]:
    """A format's coding, on a CPU with the products in C where a compiler made them."""
    if device.type == "cuda" or products_unbuilt() is not None:
        yield CODINGS.__getitem__
        return
    with HostPool(torch.get_num_threads(), joined=True) as pool:
        yield lambda name: OnHost(CODINGS[name], name, pool)


def rates(device: torch.device, seconds: float, rows: int) -> dict[str, dict[str, float]]:
    """Both rates of every format that runs, of matrices with so many ``rows``, within about ``seconds``."""
    found: dict[str, dict[str, float]] = {"decode": {}, "products": {}}
    stretch = Stretch(uncached_bytes(least_bytes=LEAST_BYTES)) if device.type == "cpu" else None
    out = torch.empty(rows, COLUMNS, dtype=torch.bfloat16, device=device)
    token = torch.ones(1, COLUMNS, dtype=torch.bfloat16, device=device)
    known = samples(rows)
    share_s = seconds / len(known) / 2
    with torch.inference_mode(), _multiplying(device) as multiplied:
        for name, shapes in known.items():
            coding = multiplied(name)
            matrices = [parts_of(shapes, device) for _ in range(ROTATED)] if stretch is None else stretch.matrices(shapes)
            decode_s = seconds_of(partial(coding.decode, out=out), matrices, device, share_s)
            found["decode"][name] = round(rows * COLUMNS / 1e9 / decode_s, 3)
            form = KNOWN_FORMATS[name]
            if (form.product_rows if device.type == "cuda" else form.host_rows) and coding.linear(token, matrices[0], None) is not None:
                took = seconds_of(partial(coding.linear, token, bias=None), matrices, device, share_s)
                found["products"][name] = round(sum(part.nbytes for part in matrices[0].values()) / 1e9 / took, 3)
    return found


def main() -> None:
    """Measure and print."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    seconds = float(given.get("seconds", "4"))
    if "threads" in given:
        torch.set_num_threads(int(given["threads"]))
    told = {"cpu": rates(torch.device("cpu"), seconds, int(given.get("rows", ROWS["cpu"])))}
    if torch.cuda.is_available():
        told["cuda"] = rates(torch.device("cuda", int(given.get("gpu", "0"))), seconds, ROWS["cuda"])
    print(json.dumps(told))


if __name__ == "__main__":
    main()
