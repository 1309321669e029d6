"""What each decision of a plan is worth: the best plan with that one decision forced to the values next to it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import CachePolicy, Decisions, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.given.workload import Objective
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.solver.program import Optimum, optimum
from penstock.planner.solver.terms.menu import MENUS, batch_menu
from penstock.planner.solver.terms.problem import Question

BATCH = "workload.batch"


@dataclass(frozen=True)
class Neighbour:
    """The plan with ``key`` at ``value``, everything else left to the program. ``decided`` is what the plan says, ``base`` what it takes,
    or the fastest of all; ``found`` is found in the same way."""

    key: str
    """What a user sets to fix it."""
    decided: Any
    value: Any
    base: Optimum
    found: Optimum | None
    why: str = ""
    """Why there is no plan."""

    @property
    def lost_s(self) -> float | None:
        """Seconds per token beyond those of ``base``."""
        return None if self.found is None else self.found.token_s - self.base.token_s

    @property
    def loss(self) -> float | None:
        """Share of what is minimised beyond that of ``base``."""
        return None if self.found is None else self.found.total_s / self.base.total_s - 1

    @property
    def is_decided(self) -> bool:
        """Whether it is the plan's own value."""
        return self.value == self.decided


def candidates(question: Question, decisions: Decisions, own: bool = False) -> list[tuple[str, Any, Any]]:
    """(name among ``Force``'s or ``BATCH``, decided, other value) for each decision that the program weighs; with ``own`` the decided
    values, too. What the question forces is no decision."""
    found = []
    for name, decided, values in _menus(question, decisions):
        if name not in question.force.given:
            found += [(name, decided, value) for value in ([decided] if own else []) + list(values)]
    return found


def neighbours(
    question: Question,
    base: Optimum,
    asked: Iterable[tuple[str, Any, Any]],
    find: Callable[[Question], Optimum | None] = optimum,
    advance: Callable[[], None] = lambda: None,
) -> tuple[Neighbour, ...]:
    """Each of ``asked`` found by ``find``, to be compared with ``base``, which it found where nothing was forced. ``advance`` is called
    after each."""
    found = []
    for name, decided, value in asked:
        why, best = "no plan fits", None
        try:
            best = find(_forced(question, base.batch, name, value))
        except UserError as error:
            why = str(error)
        found.append(Neighbour(BATCH if name == BATCH else Force.key(name), decided, value, base, best, "" if best else why))
        advance()
    return tuple(found)


def _forced(question: Question, batch: int, name: str, value: Any) -> Question:
    """At the batch of ``base``, so that a decision is compared and not another batch."""
    if name == BATCH:
        return replace(question, workload=replace(question.workload, batch=value))
    return replace(question, workload=replace(question.workload, batch=batch), force=replace(question.force, **{name: value}))


def _menus(question: Question, d: Decisions) -> Iterator[tuple[str, Any, Sequence[Any]]]:
    """Each decision: its name, its value and the values next to it that the program could have taken. Beyond its menus the prediction is
    not to be trusted: what small passes, small blocks or few reads cost a run, it does not see."""
    model, hardware, work, w = question.model, question.hardware, question.workload, d.weights
    gpu = hardware.gpu is not None
    yield "policy", w.policy, [policy for policy in CachePolicy if policy is not w.policy]
    if gpu:
        kept = w.vram.resident_units
        yield "resident_attn", kept.attn, _counts(kept.attn, 0, model.layers)
        yield "resident_ffn", kept.ffn, _counts(kept.ffn, 0, model.layers)
        yield "resident_head", kept.head, _counts(kept.head, 0, w.head_blocks)
        yield "embedding", w.embedding, [tier for tier in (Tier.vram, Tier.dram) if tier is not w.embedding]
        yield "vram_slots", w.vram.slots, _beside(MENUS.ring_slots, w.vram.slots)
    through = model.layers - (min(w.vram.resident_units.attn, w.vram.resident_units.ffn) if gpu else 0)
    yield "cap_layers", w.dram.cap_layers, _counts(w.dram.cap_layers, 0, through)
    least, most = w.dram.cap_layers + LIMITS.headroom_min, w.dram.cap_layers + LIMITS.headroom_max
    yield "hwm_layers", w.dram.hwm_layers, _counts(w.dram.hwm_layers, least, most)
    blocks, depths = ([getattr(p, name) for p in hardware.ssd_read] for name in ("block_bytes", "queue_depth"))
    yield "block_bytes", w.ssd.block_bytes, _beside(blocks, w.ssd.block_bytes, MENUS.ssd_block_min_bytes)
    yield "queue_depth", w.ssd.queue_depth, _beside(depths, w.ssd.queue_depth, MENUS.ssd_depth_min)
    if hardware.gpu:
        yield "chunk_bytes", w.h2d.chunk_bytes, _beside([size for size, _ in hardware.gpu.h2d.points], w.h2d.chunk_bytes)
    yield "page_tokens", d.kv.page_tokens, _beside(LIMITS.page_tokens, d.kv.page_tokens)
    passes = [-(-work.prompt_tokens // parts) for parts in (1, 2, 4, 8, 16, 32, 64)]
    tokens = min(d.prefill_chunk_tokens, work.prompt_tokens)
    yield "prefill_chunk_tokens", d.prefill_chunk_tokens, _beside(passes, tokens, MENUS.prefill_chunk_min_tokens)
    if d.experts and model.experts:
        fewest, layers = fewest_slots(model.experts), len(model.experts.layers)
        if gpu:
            yield "expert_vram_slots", d.experts.vram_slots, _counts(d.experts.vram_slots, fewest, model.experts.units, layers)
        yield "expert_dram_slots", d.experts.dram_slots, _counts(d.experts.dram_slots, fewest, model.experts.units, layers)
    if work.objective is Objective.throughput:
        yield BATCH, d.batch, _beside(batch_menu(replace(work, batch=0)), d.batch)


def _counts(value: int, low: int, high: int, step: int = 1) -> list[int]:
    """One ``step`` down and up, no further than the ends."""
    ends = (max(low, value - step), min(high, value + step))
    return [end for end in ends if end != value]


def _beside(menu: Iterable[int], value: int, least: int = 0) -> list[int]:
    """The nearest of ``menu`` below and above ``value``, none less than ``least``."""
    sizes = sorted(size for size in set(menu) - {value} if size >= least)
    at = bisect_left(sizes, value)
    return sizes[max(0, at - 1) : at] + sizes[at : at + 1]
