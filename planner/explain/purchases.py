"""What can be bought for a machine, or asked of it: the next card, more DRAM, a second drive, a batch of 8, fewer bits a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.common.strictly import build
from penstock.planner.contract.config.config_schema import HardwareConfig
from penstock.planner.contract.config.resolve_hardware import hardware_from
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.recording import can_record, records_whole
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.given.formats import KNOWN_FORMATS, Dtype, in_rows
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.network import Network
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.plan.plan_ranks import check_ranks
from penstock.planner.contract.prices.missed_experts import no_split
from penstock.planner.contract.prices.on_cpu import host_rows_timed, rows_timed
from penstock.planner.contract.ranks.rank_model import never_sliced
from penstock.planner.explain.margins import NOTICEABLE
from penstock.planner.explain.resources import AMOUNTS, products, with_products
from penstock.planner.explain.side_by_side import side_by_side
from penstock.planner.solver.layer_counts import fastest
from penstock.planner.solver.program import Optimum
from penstock.planner.solver.terms.problem import Question

TEN_GBIT = Network(1.25, 1e-4)
"""Of hosts that are not there: 10 Gbit/s; a hop of TCP through one switch."""
SAME_LINK = 0.9
"""Share of a link's rate within which measurements of the same link differ."""
BATCHES = (8, 4, 2)
"""Sequences that are tried together, the most that fit: enough to share a pass over the weights, few enough to find."""


@dataclass(frozen=True)
class Offer:
    """One thing that can be had."""

    key: str
    name: str
    """With its figures."""
    question: Question
    """The same question with it."""
    is_bought: bool = True


@dataclass(frozen=True)
class Purchase:
    """An offer and the fastest plan with it."""

    offer: Offer
    base: Optimum
    """Without it."""
    found: Optimum | None
    """None: no plan fits."""
    share: float
    """Requests that the base's seconds are of, over those of ``found``."""

    @property
    def gain(self) -> float:
        """Share of a request's seconds that it saves."""
        return 0.0 if self.found is None else 1 - self.found.total_s * self.share / self.base.total_s

    @property
    def pays(self) -> bool:
        """Whether it is faster by more than two solves may differ."""
        return self.gain > NOTICEABLE


def offers(question: Question) -> Iterator[Offer]:
    """What this machine can be given. Costs up to three solves, for the batch that fits."""
    q, hardware = question, question.hardware
    card = next_card(hardware)
    if card is not None and card.gpu is not None:
        yield Offer("card", f"{card.gpu.name} ({show_bytes(card.vram_bytes)})", q.on(with_card(hardware, card)))
    yield from _one_more_card(q)
    yield from _one_more_host(q)
    both = f"{show_bytes(hardware.dram_bytes)} to {show_bytes(2 * hardware.dram_bytes)}"
    yield Offer("dram", f"a second DRAM kit ({both})", q.on(replace(hardware, dram_bytes=2 * hardware.dram_bytes)))
    best = max(point.gbps for point in hardware.ssd_read)
    doubled = tuple(replace(p, gbps=2 * p.gbps) for p in hardware.ssd_read)
    drives = replace(hardware, ssd_read=doubled, ssd_write_gbps=2 * hardware.ssd_write_gbps, ssd_bytes=2 * hardware.ssd_bytes)
    yield Offer("ssd", f"a second SSD ({best:.3g} to {2 * best:.3g} GB/s)", q.on(drives))
    yield from _for_the_cpu(q)
    batches = [n for n in BATCHES if 0 < q.workload.batch < n]
    fitting = next((n for n in batches if _fits(q, n)), None)
    if fitting:
        name = f"a batch of {fitting} (workload.batch={fitting})"
        yield Offer("batch", name, replace(q, workload=_together(q, fitting)), is_bought=False)
    if q.ranks > 1 and q.share is ExpertShare.whole and q.model.experts and not never_sliced(q.model, q.ranks):
        sliced = replace(q, share=ExpertShare.sliced)
        yield Offer("share", "a slice of every expert on each rank (moe.share=sliced)", sliced, is_bought=False)
    yield from _other_forms(q)
    yield from _in_rows(q)


def _one_more_card(question: Question) -> Iterator[Offer]:
    """Another card like those that there are, with a rank more, where the model can be dealt over as many."""
    hardware, gpu, count = question.hardware, question.hardware.gpu, question.ranks + 1
    if gpu is None:
        return
    host = hardware if hardware.cards >= count else replace(hardware, devices=tuple(range(count)))
    with suppress(UserError):
        check_ranks(host, question.model, question.workload, count, question.share)
        before, after = (host.links_gbps(n) * host.links.share(n, host.links_gbps(n)) for n in (count - 1, count))
        links = f"{count} in all, links of {before:.3g} to {after:.3g} GB/s together, ranks={count}"
        yield Offer(
            "cards", f"one more {gpu.name} ({links})", replace(question, hardware=host, ranks=count, layers=()), hardware.cards < count
        )


def _one_more_host(question: Question) -> Iterator[Offer]:
    """Another machine like this one, with as many ranks, over the network that was measured, or one of 10 Gbit/s."""
    hardware, hosts = question.hardware, question.hardware.hosts + 1
    network, count = hardware.network or TEN_GBIT, question.ranks // hardware.hosts * hosts
    more = replace(hardware, hosts=hosts, network=network)
    with suppress(UserError):
        check_ranks(more, question.model, question.workload, count, question.share)
        known = "" if hardware.network else "assumed "
        way = f"a network of {known}{network.gbps:.3g} GB/s and {show_seconds(network.hop_s)} a hop"
        yield Offer(
            "hosts", f"one more host ({hosts} in all, {way}, ranks={count})", replace(question, hardware=more, ranks=count, layers=())
        )


def _for_the_cpu(question: Question) -> Iterator[Offer]:
    """What lets a CPU compute more beside the card, where it may: DRAM of twice the rate, of which its products have their share, and
    twice the cores, whose products are no faster than the bus."""
    hardware, model = question.hardware, question.model
    dense = rows_timed(hardware, model, HostUnits()) and can_record(hardware, model) and records_whole(model)
    if hardware.host is None or (no_split(hardware, model) and not dense):
        return
    gbps, bus = products(model).of(hardware), hardware.dram_bus_gbps
    if bus:
        faster = with_products(AMOUNTS["bus"].with_amount(hardware, 2 * bus), 2)
        yield Offer("channels", f"twice the DRAM channels ({bus:.3g} to {2 * bus:.3g} GB/s)", question.on(faster))
    more = with_products(hardware, 2, bus or math.inf)
    if (most := products(model).of(more)) > gbps:
        yield Offer("cores", f"twice the cores (CPU products of {gbps:.3g} to {most:.3g} GB/s)", question.on(more))


FORMS = (
    ("lossless", "lossless", "the same weights in 12 bits, to the bit (runtime pack format=lossless)"),
    ("int4", "INT4-128", "a 4-bit checkpoint of the model, groups of 128: other weights, which answer otherwise"),
)
"""Key, format and words of what a model in BF16 could be had in."""


def _other_forms(question: Question) -> Iterator[Offer]:
    """The layers' weights in fewer bits, where they are in 16. KV and activations stay as they are."""
    model = question.model
    for key, form, words in FORMS:
        other = model.stored_as(KNOWN_FORMATS[form])
        if other.weight_bytes < model.weight_bytes and model.compute_dtype is Dtype.bfloat16:
            size = f"{show_bytes(model.weight_bytes)} to {show_bytes(other.weight_bytes)}"
            yield Offer(key, f"{words} ({size})", replace(question, model=other), is_bought=False)


def _in_rows(question: Question) -> Iterator[Offer]:
    """The same numbers in the order of rows, where GPTQ or AWQ has another; not where columns have named groups. And BF16 for F16, of which
    the CPU multiplies more rows a second beside a card."""
    rows = _turned(question.model)
    if rows is not question.model:
        words = "the same numbers in an order that products read as they lie (runtime pack format=rows)"
        yield Offer("rows", words, replace(question, model=rows), is_bought=False)
    if question.model.compute_dtype is Dtype.float16 and question.hardware.host is not None:
        also = "" if rows is question.model else ", then runtime pack format=rows"
        words = f'computing in BF16, by which the CPU multiplies faster ("dtype": "bfloat16" in config.json{also})'
        kv = Dtype.bfloat16 if question.model.kv_dtype is Dtype.float16 else question.model.kv_dtype
        other = replace(rows, compute_dtype=Dtype.bfloat16, kv_dtype=kv)
        if host_rows_timed(question.hardware, other) or not no_split(question.hardware, other):
            yield Offer("bf16", words, replace(question, model=other), is_bought=False)


def _turned(model: ModelSpec) -> ModelSpec:
    """``model`` as `runtime pack format=rows` stores it; itself where there is nothing to mend."""
    turned = {unit.format: form for unit in model.units if (form := in_rows(unit.format))}
    if not turned:
        return model
    return replace(
        model, units=tuple(replace(unit, format=turned.get(unit.format, unit.format)) for unit in model.units), checkpoint=None, digest=None
    )


def _together(question: Question, batch: int) -> Workload:
    work = question.workload
    return replace(work, batch=batch, requests=max(batch, work.requests))


def _fits(question: Question, batch: int) -> bool:
    return _fastest(replace(question, workload=_together(question, batch))) is not None


def _fastest(question: Question) -> Optimum | None:
    try:
        return fastest(question)
    except UserError:  # a forced decision that the larger machine, or the batch, does not allow
        return None


def purchases(
    question: Question, offered: Sequence[Offer], base: Optimum, advance: Callable[[], None] = lambda: None
) -> tuple[Purchase, ...]:
    """One for each of ``offered``, at a solve each; ``advance`` is called after each."""

    def bought(offer: Offer) -> Purchase:
        return Purchase(offer, base, _fastest(offer.question), question.workload.requests / offer.question.workload.requests)

    return tuple(side_by_side(bought, offered, advance))


def best_purchase(found: tuple[Purchase, ...]) -> Purchase | None:
    """Of those that are bought the one that gains most; None where none gains anything."""
    return max((p for p in found if p.pays and p.offer.is_bought), key=lambda p: p.gain, default=None)


def with_card(hardware: HardwareProfile, card: HardwareProfile) -> HardwareProfile:
    """``hardware`` with the card of another machine in place of its own. The slower of both links stays: the slot may be the limit. So does
    what its host takes to launch pieces of a prompt."""
    gpu, own = card.gpu, hardware.gpu
    assert gpu is not None
    gpu = gpu if own is None else replace(gpu, prompt_piece_s=own.prompt_piece_s)
    if own is not None and own.h2d.peak < gpu.h2d.peak:
        gpu = replace(gpu, h2d=own.h2d, d2h=own.d2h, h2d_pageable_gbps=own.h2d_pageable_gbps, h2d_with_d2h_gbps=own.h2d_with_d2h_gbps)
    return replace(hardware, vram_bytes=card.vram_bytes, gpu=gpu)


def next_card(hardware: HardwareProfile) -> HardwareProfile | None:
    """Of the presets' machines the one whose card has the least more memory than this one's, with memory and link no slower; None where
    there is none."""
    larger = [card for card in preset_cards() if card.vram_bytes > hardware.vram_bytes and _is_no_slower(card.gpu, hardware.gpu)]
    return min(larger, key=lambda card: card.vram_bytes, default=None)


def _is_no_slower(card: Gpu | None, own: Gpu | None) -> bool:
    if card is None or own is None:
        return card is not None
    return card.name != own.name and card.memory_gbps >= own.memory_gbps and card.h2d.peak >= own.h2d.peak * SAME_LINK


@lru_cache(maxsize=1)
def preset_cards() -> tuple[HardwareProfile, ...]:
    """The machines of conf/hardware that have a card."""
    folder = resources.files("penstock.conf") / "hardware"
    texts = [one.read_text(encoding="utf-8") for one in folder.iterdir() if one.name.endswith(".yaml")]
    found: list[Mapping[str, Any]] = [yaml.safe_load(text) for text in texts]
    profiles = (build(HardwareConfig, {k: v for k, v in one.items() if k != "defaults"}, "hardware") for one in found if one.get("gpu"))
    return tuple(map(hardware_from, profiles))
