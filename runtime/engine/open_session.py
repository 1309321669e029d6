"""The one way in which an engine is made, and the order in which all that it holds is given back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from penstock.planner.common.interrupt import uninterrupted
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.schedules import schedules_of
from penstock.planner.contract.prices.launches import keeps_link_busier
from penstock.planner.contract.prices.memory_law import recorded_shapes
from penstock.planner.contract.prices.missed_experts import host_split
from penstock.planner.contract.prices.stages import ssd_gbps
from penstock.runtime.asked.page_room import reuse_of_rank, rooms
from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.beside.on_host import multiplying, open_on_host
from penstock.runtime.engine.converters import converters
from penstock.runtime.engine.engine import Engine
from penstock.runtime.engine.session import Kept, Mark, Session
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.engine.sides.host_side import HostSide
from penstock.runtime.experts.expert_room import CpuShare, ExpertRoom
from penstock.runtime.kv.attention.paged_kernel import open_kernel
from penstock.runtime.kv.disk.keeping import open_pages, page_shape
from penstock.runtime.kv.outside.kv_share import KvShare
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.cuda import told_in_one_line
from penstock.runtime.memory.free_memory import PeakDram
from penstock.runtime.memory.ground import Ground, OpenCard
from penstock.runtime.model.skeleton import Skeleton, import_model, open_skeleton
from penstock.runtime.ranks.opening import open_with
from penstock.runtime.store.scales import ScaleCheck


@contextmanager
def open_session(
    plan: Plan,
    checkpoint: Path,
    ground: Ground,
    options: EngineOptions | None = None,
    reuse: ReuseConfig | None = None,
    say: Callable[[str], None] | None = None,
    mark: Mark = lambda phase: None,
    read_at_once: bool = True,
) -> Iterator[Session]:
    """The model of ``checkpoint``, assembled by ``plan`` on ``ground``, which is closed with it; nothing is loaded yet.

    Takes the plan's DRAM and VRAM of weights; nothing is allocated after :meth:`Session.load` but activations and KV. KV pages are kept
    as ``reuse`` says; None keeps none. With ``read_at_once`` the arena is being filled on return. UserError where files, memory or the
    card do not do what the plan needs, also for VRAM that runs out inside, and a card that fails there.

    Of a plan of several ranks this is the part of ``ground.company``'s rank; on rank 0 the others open theirs, and give them back with it.
    Each keeps the pages of its own layers.

    Closing ends what uses memory before what holds it: kept KV, the engine's streams and threads, the readers, the pages' directory,
    then ``ground``.
    """
    with ExitStack() as stack:
        stack.callback(ground.close)
        whole, options, rank = plan, options or EngineOptions(), None
        number = 0 if ground.company is None else ground.company.rank
        plan = whole.of_rank(number) if whole.ranks.count > 1 else whole
        who = "" if ground.company is None else ground.company.who
        stack.enter_context(told_in_one_line(Budget.of(plan), ground.device, who))
        if whole.ranks.count > 1:
            closing_rank = stack.enter_context(ExitStack())
            rank = closing_rank.enter_context(open_with(ground, whole, checkpoint, options, reuse))
        import_model(checkpoint)
        mark("imports")
        changes, on_host = converters(plan, None if rank is None else rank.model), None
        if plan.hardware.gpu is None:
            stack.enter_context(multiplying(plan.hardware.cpu_threads))
            on_host = open_on_host(plan, options.cpu_product, stack)
            changes += [] if on_host is None else [on_host]
        skeleton = open_skeleton(checkpoint, changes) if rank is None else rank.part(open_skeleton(checkpoint, changes))
        scales = stack.enter_context(closing(ScaleCheck(scale for scale in skeleton.store.scales if not scale.comes_with_weights)))
        mark("skeleton")
        kept = None
        if plan.hardware.host is not None:
            units = {plan.placement.spec(unit).format for unit in plan.placement.host_units}
            threads = plan.hardware.host.threads_of(units or plan.model.ffn_formats)
            ahead_bytes = plan.hardware.host.ahead_bytes
            options = replace(options, host_threads=threads, host_ahead_bytes=ahead_bytes, schedules=schedules_of(whole))
        options = replace(options, launched=options.graphs is None and keeps_link_busier(plan.hardware, plan.placement))
        options = replace(options, verify_shapes=recorded_shapes(plan.hardware, plan.model, plan.workload, plan.decisions))
        options = replace(options, prompt_tokens=plan.decisions.recorded_prompt_tokens)
        if reuse is not None:
            options = replace(options, page_room=rooms(reuse, whole)[number], kv_scratch_dir=_place(reuse.scratch_dir))
            reuse = reuse_of_rank(reuse, whole, number)
            if options.page_room.dram_pages:
                shape = page_shape(plan, checkpoint, skeleton.model)
                begun = time.perf_counter()
                pages = None if reuse.dir is None else stack.enter_context(open_pages(reuse, plan, shape))
                kept = Kept(reuse, shape, pages, time.perf_counter() - begun)
        ground.settle()
        with uninterrupted():
            host = stack.enter_context(closing(_host_side(plan, skeleton, ground, options, say)))
        if read_at_once:
            host.begin_reading()
        mark("arena")
        copier = ground.copier()
        if rank is not None:
            rank.meet(ground.device)
            if rank.hops.refused is not None:
                options.tell(f"hidden states go from card to card by {rank.hops.by}, not by copies: {rank.hops.refused}")
        peak = PeakDram(host.arena.nbytes)
        mark("cuda")
        with uninterrupted():
            kernel = open_kernel(ground.device, None if on_host is None else on_host.summing)
            engine = stack.enter_context(closing(Engine(skeleton, host, copier, ground.device, kernel, rank)))
        scales.settle()
        drafter = None if plan.drafter is None else stack.enter_context(_open_drafter(plan.drafter, ground, options))
        mark("engine")
        if rank is not None:  # hops end before the streams that they stand between
            stack.push(closing_rank.pop_all())
        yield Session(whole, engine, peak, kept, mark, stack, on_host, drafter, rank)


def _open_drafter(plan: Plan, ground: Ground, options: EngineOptions) -> AbstractContextManager[Session]:
    """The model that drafts, by a ``plan`` of its own, on the same card and beside the DRAM of ``ground``."""
    assert plan.model.checkpoint is not None
    copier = ground.copier()
    beside = OpenCard(None if copier is None else copier.twin(), ground.device)
    own = EngineOptions(graphs=options.graphs, cpu_product=options.cpu_product, row_tokens=options.row_tokens)
    return open_session(plan, Path(plan.model.checkpoint), beside, own)


def _host_side(plan: Plan, skeleton: Skeleton, ground: Ground, options: EngineOptions, say: Callable[[str], None] | None) -> HostSide:
    """The DRAM side as ``plan`` has it: what each part needs of the plan is taken out of it here."""
    decided, ssd = plan.decisions, plan.decisions.weights.ssd
    share, split = None, host_split(plan.hardware, plan.model, decided.experts, decided.batch)
    if split is not None and plan.hardware.host is not None:
        host, dtype = plan.hardware.host, getattr(torch, plan.model.compute_dtype)
        threads = host.threads_of(plan.model.ffn_formats)
        share = CpuShare(split, threads, host.ahead_bytes, decided.batch, plan.model.hidden, dtype, plan.model.dealt is None, options.tell)
    experts = ExpertRoom.of(plan.model.experts, decided.experts, plan.placement.gpu, skeleton.store, skeleton.layers, share)
    rate = ssd_gbps(plan.hardware, ssd.block_bytes, ssd.queue_depth)
    return HostSide(plan.placement, KvShare.of(plan), experts, rate, skeleton, ground.arena, options, say)


def _place(directory: str | None) -> Path | None:
    return None if directory is None else user_path(directory)
