"""How fast the runtime decodes each format, and multiplies by it beside a card: timed by processes of their own, since the planner knows
the runtime as a program alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.planner.common.measures import show_bytes
from penstock.planner.probe.findings import CannotMeasure, Figure

DECODERS = ("cpu.decode", "cpu.products", "gpu.decode", "gpu.products")
PRODUCTS = (
    "host.threads",
    "host.products",
    "host.beside_h2d",
    "host.h2d_beside",
    "host.attention_gbps",
    "host.attention_beside_h2d",
    "host.h2d_beside_attention",
    "host.ahead_bytes",
    "host.format_threads",
    "host.f16_products",
)
PROMPTS = ("gpu.prompt_piece_s",)
HOPS = ("links.hop_s", "links.p2p_gbps")
LINKS = ("links.together_gbps", *HOPS, "links.word_hop_s", "links.vram_bytes")
HOP_WAYS = {"copies": "copies from GPU to GPU", "NCCL": "NCCL send and receive", "gloo": "gloo send and receive"}
"""By what hops go, in words."""
DECODERS_PATIENCE_S, PRODUCTS_PATIENCE_S, LINKS_PATIENCE_S, PROMPTS_PATIENCE_S = 40.0, 70.0, 60.0, 40.0
"""A process that takes longer is ended: imports, and the slowest decoders three times, or products of every format, or all GPUs in turn."""


def measure_decoders(seconds: float, rows: int, threads: int, gpu: int | None) -> Iterator[Figure]:
    """Rates by format, within about ``seconds`` for each device beside what importing torch takes. ``rows``: of matrices on the CPU."""
    words = [f"seconds={seconds}", f"rows={rows}", *([f"threads={threads}"] if threads else []), *([] if gpu is None else [f"gpu={gpu}"])]
    told = _told("decoder_times", words, "the decoders", DECODERS_PATIENCE_S)
    how = "each format's matrices of 4096 columns in turn, median"
    yield Figure("cpu.decode", told["cpu"]["decode"], f"1e9 elements/s decoded into memory, {how}")
    yield Figure("cpu.products", told["cpu"]["products"], f"GB/s of stored bytes, products of one row, {how}")
    if gpu is not None and "cuda" in told:
        yield Figure("gpu.decode", told["cuda"]["decode"], f"1e9 elements/s decoded into memory, {how}")
        yield Figure("gpu.products", told["cuda"]["products"], f"GB/s of stored bytes, products of one row, {how}")


def measure_products(seconds: float, cores: int, gpu: int, bus_gbps: float) -> Iterator[Figure]:
    """Rates of the CPU by format and rows, within about ``seconds`` beside what importing torch and filling matrices takes. Where products
    and copies moved more than ``bus_gbps``, which is what plain reads found, the bus has more, too."""
    words = [f"cores={cores}", f"seconds={seconds}", f"gpu={gpu}"]
    told = _told("host_product_times", words, "the CPU's products", PRODUCTS_PATIENCE_S)
    if "unbuilt" in told:
        raise CannotMeasure(told["unbuilt"])
    how = "BF16 FFN of 4096 x 14336, one row"
    if told["bus_gbps"] > bus_gbps:
        yield Figure("dram.bus_gbps", told["bus_gbps"], f"products and copies together; plain reads got {bus_gbps:.1f} GB/s")
    yield Figure("host.threads", told["threads"], f"the most of CPU and link together, {how}")
    turned = f"FFNs of 4096 x 14336 that take turns over {show_bytes(told['turned_bytes'])}, alone"
    yield Figure("host.products", told["products"], f"GB/s of stored bytes by rows, {turned}")
    yield Figure("host.f16_products", told["f16_products"], "GB/s of stored bytes by rows of F16, the same FFNs, alone")
    yield Figure("host.beside_h2d", told["beside_h2d"], f"products beside copies over products alone, {how}")
    yield Figure("host.h2d_beside", told["h2d_beside"], f"copies beside products over copies alone, {how}")
    yield Figure(
        "host.format_threads",
        told["format_threads"],
        "threads by which CPU and link together move more of a format, FFN of 4096 x 14336, one row",
    )
    cache = "half of what a hardware thread has of its core's second-level cache, as the kernel tells"
    yield Figure("host.ahead_bytes", told["ahead_bytes"], cache)
    attended = "attention of 16 sequences of 8192 tokens, BF16"
    yield Figure("host.attention_gbps", told["attention_gbps"], f"K and V read by {attended}, alone")
    yield Figure("host.attention_beside_h2d", told["attention_beside_h2d"], f"the same beside copies over alone, {attended}")
    yield Figure("host.h2d_beside_attention", told["h2d_beside_attention"], f"copies beside that over copies alone, {attended}")


def measure_prompts(seconds: float, gpu: int) -> Iterator[Figure]:
    """What the host takes to launch a layer of a prompt that is recorded around its attention; 0 where none is."""
    told = _told("prompt_times", [f"gpu={gpu}", f"seconds={seconds}"], "recorded prompts", PROMPTS_PATIENCE_S)
    how = "a Llama of tiny layers, 64 tokens, each layer in two CUDA graphs around its attention: median"
    how = f"prompts are not recorded here: {told['refused']}" if "refused" in told else how
    yield Figure("gpu.prompt_piece_s", told.get("piece_s", 0.0), how)


def measure_links(
    seconds: float, peaks_gbps: Mapping[int, float], alike: Sequence[int], own: int, vram_bytes: int, context_bytes: int
) -> Iterator[Figure]:
    """What the links of all GPUs in ``peaks_gbps`` carry at once, and what goes from one to the next, each in a process of its own as ranks
    have it. Curves are of copies from another mapping, so rates at once are relative to the same processes' alone, which are these peaks.
    ``own`` is the GPU that this process has filled in part; the others that are ``alike`` may have less room than its ``vram_bytes``."""
    gpus, peaks = list(peaks_gbps), list(peaks_gbps.values())
    words = [f"devices={','.join(map(str, gpus))}", f"seconds={seconds}"]
    told = _told("rank_times", words, "the links of all GPUs", LINKS_PATIENCE_S)
    alone = told["alone"]
    rows = [[1, peaks[0]], *([n, round(gbps / sum(alone[:n]) * sum(peaks[:n]), 3)] for n, gbps in told["together"])]
    each = ", ".join(f"GPU {gpu} {gbps:.3g}" for gpu, gbps in zip(gpus, alone, strict=True))
    how = f"a process a GPU; alone in turn: {each} GB/s"
    yield Figure("links.together_gbps", rows, f"copies of 64 MiB out of {show_bytes(told['read_bytes'])} each by {how}")
    by, taken = told["hops"]["by"], told["hops"]["vram_bytes"]
    yield Figure("links.hop_s", told["hop_s"], f"{HOP_WAYS[by]} of 16 KiB, half of there and back, all links busy, median")
    yield Figure("links.vram_bytes", taken, f"what they took of the first GPU, by {by}")
    yield Figure("links.p2p_gbps", told["p2p_gbps"], "the same of 64 MiB, links idle")
    how = "16 KiB through page-locked memory inside CUDA graphs, half of there and back, all links busy, median"
    yield Figure("links.word_hop_s", told["word_hop_s"], how if told["word_hop_s"] else "steps with hops are not recorded here")
    room = [free + context_bytes for gpu, free in zip(gpus, told["free_bytes"], strict=True) if gpu != own and gpu in alike]
    if min(room, default=vram_bytes) < vram_bytes:
        yield Figure("vram_bytes", min(room), f"the least of {len(alike)} GPUs: free beside the context")


def measure_hops(seconds: float) -> Iterator[Figure]:
    """What goes from one process to the next where there are no GPUs."""
    told = _told("rank_times", ["devices=cpu,cpu", f"seconds={seconds}"], "hops between processes", LINKS_PATIENCE_S)
    yield Figure("links.hop_s", told["hop_s"], "gloo send and receive of 16 KiB, half of there and back, both processes copying, median")
    yield Figure("links.p2p_gbps", told["p2p_gbps"], "the same of 64 MiB, nothing copied")


def _told(tool: str, words: list[str], what: str, patience_s: float) -> Any:
    command = [sys.executable, "-m", f"penstock.runtime.timed.{tool}", *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=patience_s)
    except subprocess.TimeoutExpired as error:
        raise CannotMeasure(f"timing {what} took more than {patience_s:g} s") from error
    if done.returncode:
        raise CannotMeasure(f"timing {what} failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1][:200]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
