"""What the benchmarks' JSON files hold, as Markdown tables and as figures beside their targets: `docs/results_page.py` gathers them.

A file's study is its name up to the first ``-``: ``moe.json`` and ``moe-qwen3.json`` are both of :data:`STUDIES` ``["moe"]``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from penstock.planner.common.measures import show_bytes, show_seconds

Document = Mapping[str, Any]
SIGNS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, "=": operator.eq}
DIGITS = 3
"""Decimals of a ratio, when it is compared with its target as well as when it is shown."""
REGRET, RANKS, SIMULATED = "<= 1.03", ">= 0.95", "<= 0.05"
"""Targets of a plan's step over the best neighbour's, of the rank correlation of predicted and measured, and of a simulation's error."""


@dataclass(frozen=True)
class Check:
    """One measured figure beside its target, such as ``<= 1.08``; ``run`` names the code it is of, where a file has several."""

    what: str
    value: float
    target: str
    run: str = ""

    @property
    def met(self) -> bool:
        sign, bound = self.target.split()
        return SIGNS[sign](round(self.value, DIGITS), float(bound))


def no_target(document: Document) -> Iterator[Check]:
    yield from ()


@dataclass(frozen=True)
class Study:
    """How to show one benchmark's files. ``script`` is under bench/, and its docstring has the commands; or ``commands`` are given."""

    title: str
    says: str
    table: Callable[[Any], Iterator[str]]
    checks: Callable[[Any], Iterator[Check]] = no_target
    script: str = ""
    commands: Sequence[str] = ()


def rows_table(document: Document) -> Iterator[str]:
    """Rows of ``bench/cases.py``; those of ``bench/kv_reuse.py`` name their limit ``bound``."""
    runs = any(row.get("run") for row in document["rows"])
    yield from head("case", "work", "measured", "limit", "ratio", "target", "met", "predicted", *(["run"] if runs else []))
    for row in document["rows"]:
        unit, limit, target = row["unit"], row.get("limit", row.get("bound")), row["target"]
        figures = (f"{row['result']:.4g} {unit}", f"{limit:.4g} {unit}", ratio(row["ratio"]), target or "–")
        judged = met(Check(row["case"], row["ratio"], target)) if target else ""
        yield cells(row["case"].strip(), row["what"], *figures, judged, ratio(row["predicted"]), *([row.get("run", "")] if runs else []))


def rows_checks(document: Document) -> Iterator[Check]:
    for row in document["rows"]:
        if row["target"]:
            yield Check(f"{row['case'].strip()}: {row['what']}", row["ratio"], row["target"], row.get("run", ""))


def peers_table(document: Document) -> Iterator[str]:
    """Rows of ``bench/peers/run.py``."""
    work = document["work"]
    yield (
        f"A checkpoint of {show_bytes(work['checkpoint_bytes'])}, VRAM budget {show_bytes(work['vram_bytes'])}, batch {work['batch']}, "
        f"prompt {work['prompt_tokens']}, {work['new_tokens']} new tokens.\n"
    )
    titles = ("tokens/s", "times Penstock's", "of the link's limit", "VRAM", "DRAM", "same tokens")
    yield from head("system", "prefill", "decode, a token", *titles)
    for row in document["rows"]:
        if row["message"]:
            yield cells(row["title"], row["message"], *[""] * 7)
            continue
        figures = (f"{row['tokens_per_s']:.3g}", f"{row['times_penstock']:.2f}", f"{row['of_limit']:.1%}")
        sizes = (show_bytes(row["vram_bytes"]), show_bytes(row["dram_bytes"]), f"{row['agreed']:.0%}")
        yield cells(row["title"], show_seconds(row["prefill_s"]), show_seconds(row["decode_s"]), *figures, *sizes)


MECHANISMS = {
    "synchronous": "synchronous copies, pageable, nothing ahead",
    "asynchronous": "+ a stream and events of their own",
    "prefetch": "+ prefetch",
    "locked": "+ page-locked arena",
    "residents": "+ residents, in the first layers",
    "spread": "+ residents spread over the layers",
    "no_wrap": "- wrap-around to the next pass",
    "small_pages": "- huge pages",
}
"""Name of a row -> its title."""


def mechanisms_table(document: Document) -> Iterator[str]:
    """A row for each engine that was put together of fewer mechanisms."""
    yield from head("mechanism", "prefill", "decode, a token", "H2D, a token", "link's limit", "page-locked", "resident")
    for row in document["rows"]:
        title, made = MECHANISMS[row["name"]], row["measured"]
        if made is None:
            yield cells(title, row["message"], *[""] * 5)
            continue
        moved = (show_bytes(made["h2d_bytes_per_token"]), f"{made['limit_gbps']:.1f} GB/s")
        kept = (f"{made['locked_share']:.0%}", show_bytes(made["resident_bytes"]))
        yield cells(title, show_seconds(made["prefill_s"]), show_seconds(median(made["step_s"])), *moved, *kept)


def regret_table(document: Document) -> Iterator[str]:
    """The summary of ``bench/regret.py``, a row for each budget."""
    titles = ("points", "regret", "beyond noise", "met", "noise of the plan", "best", "rank correlation", "met", "predicted")
    yield from head("VRAM:DRAM", *titles)
    for budget, facts in document["budgets"].items():
        regret = _regret(budget, facts)
        rest = (ratio(facts["noise"]), facts["best"], ratio(facts["rank_correlation"]), "", ratio(facts["predicted_over_measured"]))
        yield cells(f"`{budget}`", facts["points"], ratio(facts["regret"]), ratio(regret.value), met(regret), *rest)
    whole = Check("", document["rank_correlation"], RANKS)
    yield cells("all", len(document["points"]), *[""] * 5, ratio(whole.value), met(whole), "")


def regret_checks(document: Document) -> Iterator[Check]:
    """The order of points is judged over all budgets: within one, most differ by less than the noise."""
    for budget, facts in document["budgets"].items():
        yield _regret(budget, facts)
    yield Check("rank correlation of all points", document["rank_correlation"], RANKS)


def _regret(budget: str, facts: Document) -> Check:
    """Beyond noise, where the file tells that."""
    return Check(f"regret at {budget}", facts.get("regret_beyond_noise", facts["regret"]), REGRET)


def report_table(document: Document) -> Iterator[str]:
    """A report of `runtime run`: what was predicted, beside its measurement."""
    yield from head("figure", "predicted", "measured", "predicted over measured")
    for key, value in document["ratio"].items():
        show = show_bytes if "bytes" in key else "{:.4g}".format if "per_s" in key else show_seconds
        yield cells(f"`{key}`", show(document["predicted"][key]), show(document["measured"][key]), ratio(value))
    if logits := document["logits"]:
        same = "identical, bit for bit" if logits["identical"] else f"a relative difference of {logits['relative_l2']:.3g}"
        yield f"\nLogits of {logits['passes']} passes beside the unstreamed model's: {same}."


def simulate_table(document: Document) -> Iterator[str]:
    """Rows of ``bench/simulate.py``."""
    yield from head("case", "phase", "measured", "closed form", "simulated", "the run's own rates", "those of the run before")
    for row in document["rows"]:
        ratios = [ratio(row[key]) for key in ("closed", "simulated", "own_rates", "before")]
        yield cells(row["case"], row["phase"], show_seconds(row["measured_s"]), *ratios)


def simulate_checks(document: Document) -> Iterator[Check]:
    """How far the simulation is off by the run's own rates, medians over repeats."""
    rows = document["rows"]
    for case, phase in dict.fromkeys((row["case"], row["phase"]) for row in rows):
        found = median(row["own_rates"] for row in rows if (row["case"], row["phase"]) == (case, phase))
        yield Check(f"{case}, {phase}: simulated over measured, away from 1", abs(found - 1), SIMULATED)


def met(check: Check) -> str:
    return "yes" if check.met else "**no**"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.{DIGITS}f}"


def head(*titles: str) -> Iterator[str]:
    yield cells(*titles)
    yield "|" + "---|" * len(titles)


def cells(*row: object) -> str:
    return "| " + " | ".join(re.sub(r"\s+", " ", str(cell)).replace("|", "\\|") for cell in row) + " |"


def passes_table(document: Document) -> Iterator[str]:
    """What ``bench/rows.py`` printed."""
    titles = {
        "alone_s": "one prompt of 3,008 tokens",
        "prompts_s": "the same tokens as 1 x 2048 and 15 x 64",
        "equal_s": "decode step, 96 rows behind 1,024 tokens each",
        "unequal_s": "decode step, 96 rows behind 512 to 1,535",
        "loose_s": "the same in pages that lie anywhere",
        "one_by_one_s": "the same, a call of attention a row",
    }
    yield f"{document['layers']} layers of an 8B geometry, torch {document['torch']}.\n"
    yield from head("pass", "seconds")
    yield from (cells(title, show_seconds(document[name])) for name, title in titles.items())


def passes_checks(document: Document) -> Iterator[Check]:
    yield Check("1 x 2048 and 15 x 64 tokens over their tokens alone", document["prompts_to_alone"], "<= 1.1")


def graphs_table(document: Document) -> Iterator[str]:
    """What ``bench/graphs.py`` printed."""
    yield f"{document['layers']} layers of an 8B geometry, torch {document['torch']}.\n"
    yield from head("rows", "launch by launch", "one graph", "kernels", "same tokens")
    for row in document["batches"]:
        times = (show_seconds(row["launches_s"]), show_seconds(row["graph_s"]))
        yield cells(str(row["rows"]), *times, str(row["kernels"]), "yes" if row["same_tokens"] else "no")


def fuzz_table(document: Document) -> Iterator[str]:
    """What ``bench/fuzz.py`` counted."""
    yield f"{document['seconds']} s of CPU, seed {document['seed']}, Python {document['python']}.\n"
    yield from head("kind", "cases", "read", "refused in a line", "bites", "slowest")
    for row in document["rows"]:
        counts = (row["cases"], row["accepted"], row["refused"], sum(row["bites"].values()))
        yield cells(row["kind"], *map(str, counts), show_seconds(row["slowest_s"]))


ZOO = ("plans", "runs", "identical", "packed", "text", "streamed")


def zoo_table(document: Document) -> Iterator[str]:
    """What ``bench/zoo.py`` found of each architecture."""
    cases = document["cases"]
    yield f"transformers {document['transformers']}, torch {document['torch']}.\n"
    for group in dict.fromkeys(case["group"] for case in cases.values()):
        judged = [case for case in cases.values() if case["group"] == group and case["judged"]]
        whole = sum(all(case.get(column) for column in ZOO) for case in judged)
        yield f"* {group}: {whole} of {len(judged)} hold in every column"
    yield ""
    yield from head("case", *ZOO, "why not")
    for name, case in cases.items():
        marks = ("–" if case.get(column) is None else "yes" if case[column] else "**no**" for column in ZOO)
        yield cells(name, *marks, case.get("error", ""))


STUDIES: Mapping[str, Study] = {
    "link": Study(
        "Each link at its limit",
        "Weights that stream from DRAM or the SSD, prefill, batches and the start. For rates a ratio below one falls short of the limit, "
        "for seconds one above.",
        rows_table, rows_checks, "link.py"),
    "formats": Study(
        "Fewer bytes a weight",
        "Coded checkpoints, streamed and resident, beside plain ones and beside each link's limit. Weights are random.",
        rows_table, rows_checks, "formats.py"),
    "hybrid": Study(
        "Steps computed where the bytes lie",
        "The CPU computes units beside the card. The limit is streaming alone, or the slowest of bus, CPU, link and chain, measured by the "
        "process that ran the plans.",
        rows_table, rows_checks, "hybrid.py"),
    "hybrid_routed": Study(
        "Routed experts computed where the bytes lie",
        "The CPU computes missed experts beside the card. The limit is the slowest of bus, CPU, link and chain, or copying alone.",
        rows_table, rows_checks, "hybrid_routed.py"),
    "speculation": Study(
        "Drafted tokens",
        "Passes that verify drafts beside one without, and tokens a second where each draft is kept with a probability that is played. The "
        "limit of the latter is E(a, k) over the seconds of a pass with the best k; or what that k makes of the same draws, without luck.",
        rows_table, rows_checks, "speculation.py"),
    "drafters": Study(
        "Drafters on trained models",
        "Tokens a second of replies with drafts over those without, pair by pair in one process, or over streaming alone.",
        rows_table, rows_checks, "drafters.py"),
    "llama_rate": Study(
        "The CPU's products beside llama.cpp's",
        "Stored bytes a second. Our product's limit is llama.cpp's decode at its best thread count, or a plain read where that is lower.",
        rows_table, rows_checks, "peers/llama_rate.py"),
    "beside_llama": Study(
        "llama.cpp beside us",
        "The same geometry, random weights and the same VRAM, in alternated runs. The limit is llama.cpp at its best thread count, way of "
        "loading and number of layers in VRAM.",
        rows_table, rows_checks, "beside_llama.py"),
    "peers": Study(
        "Beside other systems",
        "The same work under the same VRAM budget, each system in a process of its own. Where tokens differ, `docs/log.md` says why.",
        peers_table, no_target, "peers/run.py"),
    "ranks": Study(
        "Several cards",
        "One checkpoint by plans of several ranks. The limit of bytes is what all links carried at once, of steps what one card took; hops "
        "are timed beside copies. Ranks that are lost in the middle: bench/rank_faults.py.",
        rows_table, rows_checks, "ranks.py"),
    "hosts": Study(
        "Two hosts",
        "Two groups of processes on one machine play hosts. A token bucket holds each group's reads to a share of the drive; its sends are "
        "held to a network's rate and latency. The file says which. The limit is what the held drives give together.",
        rows_table, rows_checks, "hosts.py"),
    "pairs": Study(
        "The code before and after its rebuilding",
        "The code before its rebuilding and after, in alternated pairs: the limit is the median of the old code. Rows whose plans differ "
        "have no target. The runs below name the new code.",
        rows_table, rows_checks, "pairs.py"),
    "rows": Study(
        "Rows of unequal lengths",
        "Passes over a resident model: what unequal prompts and unequal decode rows cost.",
        passes_table, passes_checks, "rows.py"),
    "graphs": Study(
        "A resident step as a CUDA graph",
        "The same decode step issued kernel by kernel, and replayed as one graph.",
        graphs_table, no_target, "graphs.py"),
    "mechanisms": Study(
        "What each mechanism buys",
        "Each row with + adds a mechanism to the row before, each row with - takes one from the whole. The question is "
        "answered: the script that put these engines together is in the history alone.",
        mechanisms_table, commands=("git log --diff-filter=D -- bench/mechanisms.py",)),
    "regret": Study(
        "A plan beside its neighbours",
        "Regret is the plan's measured step over that of the best neighbour, each run for real, in shuffled order. Noise is the range of "
        "the plan's own repeats over their median; beyond it, the plan's fastest repeat is over the best neighbour's slowest.",
        regret_table, regret_checks, "regret.py"),
    "kv_stream": Study(
        "KV that streams",
        "KV of a running batch outside VRAM. The peer is transformers' offloaded cache over a model that lies in VRAM; its ratio is its "
        "step over that of the first row.",
        rows_table, rows_checks, "kv_stream.py"),
    "kv_reuse": Study(
        "Prompts that begin alike",
        "Time to the first token when a prompt's beginning is restored. The limit is its bytes at the tier's rate and computing the rest.",
        rows_table, rows_checks, "kv_reuse.py"),
    "moe": Study(
        "Experts",
        "Routed experts that pass through slots. The limit of a step is the slower of moving and computing, although at batch one a "
        "layer's fetches begin when its router has computed.",
        rows_table, rows_checks, "moe.py"),
    "gpt_oss": Study(
        "gpt-oss in MXFP4 beyond the card's memory",
        "Each case beside the sum over layers of what is missed, at its link's rate, and the layer's own time, measured by the process "
        "that ran; and what a MoE layer takes of the host. The file says what was mended since.",
        rows_table, rows_checks, "gpt_oss.py"),
    "host_products": Study(
        "The CPU's products",
        "Units that the CPU computes, in each format, beside a plain read of the same bytes by the same threads.",
        rows_table, rows_checks, "host_products.py"),
    "host_attention": Study(
        "Attention where its KV lies",
        "The CPU attends over KV in DRAM. The limit is a plain read by as many threads; with the link, what the link carries alone.",
        rows_table, rows_checks, "host_attention.py"),
    "simulate": Study(
        "Simulated beside a run",
        "Ratios are over measured: the closed form and the simulation by the probed profile, the simulation by the rates that the "
        "stages of the run itself had, which is what is checked, and by those of the same case's run before.",
        simulate_table, simulate_checks, "simulate.py"),
    "fuzz": Study(
        "Hostile inputs",
        "Sound inputs after a few edits of bytes or leaves. One bites where anything but a refusal of one line leaves its reader, where it "
        "hangs, or where the process grows.",
        fuzz_table, no_target, "fuzz.py"),
    "zoo": Study(
        "Decoders of transformers",
        "Tiny and random, three prompts of unequal lengths as one batch, three layers in DRAM at a time. *identical*: logits against the "
        "unstreamed model's; *packed*: the same tokens from a packed store; *text*: that of `generate` for each prompt alone.",
        zoo_table, no_target, "zoo.py"),
    "one_row": Study(
        "Steps launched and recorded",
        "A step of one row that streams, as the plan has it and recorded, in turns, each in a process of its own. The "
        "limit is its bytes over what copies out of the run's own DRAM give afterwards.",
        rows_table, rows_checks, "one_row.py"),
    "prompt_graphs": Study(
        "A resident prompt as CUDA graphs",
        "All in VRAM. Launched kernel by kernel, and as a graph between the attention of one layer and that of the next, in turns: seconds "
        "of a pass over those of its kernels.",
        rows_table, rows_checks, "prompt_graphs.py"),
    "waits": Study(
        "Copies beside kernels that wait",
        "What the link gives copies while a stream of kernels waits for them by events, by words, or inside a CUDA graph, on one "
        "stream of copies or two. The limit is copies alone in the same process.",
        rows_table, rows_checks, "waits.py"),
    "product_rates": Study(
        "A card's products over time",
        "Matrix products from the moment the card has rested until two seconds of them, alone and beside copies, over the first ones.",
        rows_table, rows_checks, "product_rates.py"),
    "serve": Study(
        "Serving",
        "Rows of one pass as a fixed batch and in the server, clients that come and go, TTFT under load, throughput beside the "
        "simulator, the engine between steps. Limits and predictions are of the same machine.",
        rows_table, rows_checks, "serve.py"),
    "serve_faults": Study(
        "A server on its bad days",
        "Each case counts what went wrong among so many tries; of memory the limit is what the process held after a fifth of the requests.",
        rows_table, rows_checks, "serve_faults.py"),
    "front": Study(
        "A front alone",
        "An engine that is played gives every stream a token a pass; how long each takes into its client's hands.",
        rows_table, rows_checks, "front.py"),
    "serve_guidellm": Study(
        "Clients beside guidellm and aiperf",
        "The same requests by bench/clients.py and by each of them, at a server whose own pace is known. The ratio is how far apart they "
        "are.",
        rows_table, rows_checks, "peers/guidellm_beside.py"),
    "serve_peers": Study(
        "Beside servers that others wrote",
        "The same requests of as many clients, tokens a second. The limit is the other server's.",
        rows_table, rows_checks, "serve.py"),
    "serve_clients": Study(
        "Clients that others wrote",
        "Against a server of a tiny trained model whose replies end. llm-comply: tests that pass; those left out want images, or a model "
        "that reasons. lm-eval: loglikelihoods and replies beside transformers' own.",
        rows_table, rows_checks, "serve_clients.py"),
    "run": Study(
        "Reports of single runs",
        "What `runtime run` wrote: [running.md](running.md) explains it.",
        report_table, no_target, "",
        ("planner solve hardware=local model=hf model.checkpoint=DIR", "runtime run plan=plan.yaml validate=full out=run.json")),
}  # fmt: skip
