"""Every decoder and every product from the stored form on a card, beside BF16's own product of the same sizes.

    python bench/decoders.py [formats=int4,gptq] [rows=1,4,8,16] [repeats=20]

For each format and size of matrix: decoding, in GB/s of stored bytes and in the time of reading the BF16 matrix once; products of so many
rows, in GB/s of stored bytes and as a ratio to F.linear's time. Launches are replayed as one CUDA graph, matrices take turns so that the
L2 holds none. Ends with one JSON line. Products that a coding leaves to decoding are not shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from bench.coded_synth import RECIPES  # noqa: E402
from bench.keys import given_of  # noqa: E402
from penstock.planner.contract.given.formats import KNOWN_FORMATS  # noqa: E402
from penstock.planner.contract.stored.scheme import sort_tensors  # noqa: E402
from penstock.planner.contract.stored.schemes import scheme_of  # noqa: E402
from penstock.runtime.formats.coding import Coding, Parts  # noqa: E402
from penstock.runtime.formats.codings import CODINGS  # noqa: E402
from penstock.runtime.store.parameters import DTYPES  # noqa: E402

SIZES = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096))
"""Rows and columns of an 8B model's matrices."""
TURNS_BYTES = 256 << 20
"""Matrices that take turns have at least so many bytes: several times an L2."""
TABLES = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")


def random_parts(form: str, rows: int, columns: int) -> tuple[str, dict[str, torch.Tensor]]:
    """Name of the format, and a matrix's leaves as a checkpoint would give them."""
    if form in TABLES:
        return form, {"weight": torch.randint(0, 60, (rows, KNOWN_FORMATS[form].stored_bytes(1, columns)), dtype=torch.uint8)}
    made = {one.name: one for one in RECIPES[form].leaves("layers.0.mlp.up_proj", rows, columns)}
    scheme = scheme_of(RECIPES[form].said, "config.json")
    (matrix,) = sort_tensors({name: (one.nbytes, one.shape, one.dtype) for name, one in made.items()}, scheme).matrices.values()
    parts = {}
    for leaf, stored in matrix.leaves.items():
        held = bytearray(b"".join(made[stored.tensor].pieces()))
        found = torch.frombuffer(held, dtype=DTYPES[stored.dtype]).view(stored.shape)
        parts[leaf] = found.bfloat16() if stored.dtype == "F16" else found
    return matrix.format.name, parts


def seconds(work: Sequence[Callable[[], object]], repeats: int) -> float:
    """Of one of ``work``, all of which are replayed as one graph: the median."""
    for one in work[:2]:
        one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in work:
            one()
    took = []
    for _ in range(repeats + 2):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        took.append(begun.elapsed_time(ended) / 1e3 / len(work))
    return median(took[2:])


def turns(parts: Parts) -> list[dict[str, torch.Tensor]]:
    """Copies of a matrix on the card."""
    count = max(2, -(-TURNS_BYTES // sum(part.nbytes for part in parts.values())))
    return [{leaf: part.to("cuda", copy=True) for leaf, part in parts.items()} for _ in range(count)]


def plain_seconds(size: tuple[int, int], rows: int, repeats: int) -> float:
    """Of F.linear in BF16."""
    weights = [each["weight"] for each in turns({"weight": torch.randn(size, dtype=torch.bfloat16)})]
    x = torch.randn(rows, size[1], dtype=torch.bfloat16, device="cuda")
    return seconds([lambda weight=weight: F.linear(x, weight) for weight in weights], repeats)


def measured(
    coding: Coding, parts: Parts, size: tuple[int, int], plain: Mapping[int, float], repeats: int
) -> Iterator[tuple[str, float, float]]:
    """(what, seconds, ratio to F.linear's) of decoding and of each product."""
    held = turns(parts)
    out = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    took = seconds([lambda each=each: coding.decode(each, out) for each in held], repeats)
    yield "decode", took, took / plain[1]
    for rows, linear_s in plain.items():
        x = torch.randn(rows, size[1], dtype=torch.bfloat16, device="cuda")
        if coding.linear(x, held[0], None) is None:
            continue
        took = seconds([lambda each=each, x=x: coding.linear(x, each, None) for each in held], repeats)
        yield f"{rows} rows", took, took / linear_s


def main() -> None:
    """Measure and print."""
    keys = given_of(sys.argv[1:], {"formats", "rows", "repeats"})
    forms = keys.get("formats", ",".join([*RECIPES, *(name for name in TABLES if name in CODINGS)])).split(",")
    counts, repeats = [int(word) for word in keys.get("rows", "1,4,8,16").split(",")], int(keys.get("repeats", "20"))
    found: list[dict[str, object]] = []
    with torch.inference_mode():
        for size in SIZES:
            plain = {rows: plain_seconds(size, rows, repeats) for rows in counts}
            read = size[0] * size[1] * 2 / plain[counts[0]] / 1e9
            print(f"{size[0]} x {size[1]}: F.linear in BF16 of {counts[0]} rows {plain[counts[0]] * 1e6:.1f} us, {read:.0f} GB/s")
            for form in forms:
                name, parts = random_parts(form, *size)
                nbytes = sum(part.nbytes for part in parts.values())
                for what, took, ratio in measured(CODINGS[name], parts, size, plain, repeats):
                    gbps = nbytes / took / 1e9
                    print(f"  {name:12} {what:8} {took * 1e6:8.1f} us  {gbps:6.0f} GB/s stored  {ratio:5.2f} x F.linear")
                    found.append({"format": name, "size": size, "what": what, "us": took * 1e6, "gbps": gbps, "ratio": ratio})
    print(json.dumps({"device": torch.cuda.get_device_name(), "results": found}))


if __name__ == "__main__":
    main()
