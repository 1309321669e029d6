"""A streamed model, assembled from a plan: store, arena, cache, ring and the `transformers` module bound to them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch

from penstock.planner.common.interrupt import uninterrupted
from penstock.planner.contract.decided.recording import reads_layers
from penstock.planner.contract.policy.schedule_choice import ScheduleChoice
from penstock.runtime.beside.host_pool import pool_here
from penstock.runtime.engine.passes.generate import Batch, Progress
from penstock.runtime.engine.passes.prompt_recording import PromptRecording
from penstock.runtime.engine.passes.recorded_side import FedStepper
from penstock.runtime.engine.passes.rehearsal import meet_loose_rows, rehearse
from penstock.runtime.engine.passes.step_inputs import CopiedInputs, MappedInputs, StepInputs
from penstock.runtime.engine.passes.step_recording import StepRecording
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.engine.sides.bound_fixtures import bind_fixtures
from penstock.runtime.engine.sides.card_side import CardSide
from penstock.runtime.engine.sides.handed_side import open_handed
from penstock.runtime.engine.sides.host_side import HostSide
from penstock.runtime.engine.sides.launch_seconds import LaunchSeconds
from penstock.runtime.engine.sides.loading import Loading
from penstock.runtime.experts.streamed_experts import Experts
from penstock.runtime.handed.handed_steps import HandedSteps
from penstock.runtime.kv.attention.page_tables import PagedKernel
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import kinds
from penstock.runtime.kv.outside.host_attention import HostAttention
from penstock.runtime.kv.outside.outside_kv import OutsideKv
from penstock.runtime.kv.pages.page_tiers import PageMemory
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.model.binding import Binder
from penstock.runtime.model.rows import Step
from penstock.runtime.model.skeleton import Skeleton
from penstock.runtime.model.stored_formats import close_scratches
from penstock.runtime.moving.ring import RingStats
from penstock.runtime.moving.stream import HostStream, Rehearsal, RingStream
from penstock.runtime.ranks.rank import Rank


class Engine:
    """``model`` can be called like the unstreamed one after :meth:`finish_loading`; units move underneath by the plan.

    Takes one block of VRAM with a GPU; nothing is allocated after that but activations and KV. ``copier`` is None to compute on the CPU
    from two tiers. ``host`` stays its maker's to close, after this. Made by ``open_session`` alone.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        host: HostSide,
        copier: CopyDevice | None,
        device: torch.device,
        kernel: PagedKernel | None = None,
        rank: Rank | None = None,
    ):
        self.device = device
        self.model = skeleton.model
        self.copier = copier
        self._rank = rank
        copies, kv = host.placement.weights.h2d, host.kv
        self.chunking = copies.chunk_bytes, copies.in_flight
        self._placement = host.placement
        self._stack, self._taken = ExitStack(), ExitStack()
        self._stack.callback(self._give_back)  # behind all that uses it
        self._taken.callback(close_scratches, skeleton.model)
        try:
            self.host, options = host, host.options
            self.arena, self.pool, self.dram, self.ledger = host.arena, host.pool, host.dram, host.ledger
            self.card = None if copier is None else CardSide(self.host, copier, device)
            if self.card is None:
                tensors = {u: x.tensors for u, x in self.host.layouts.items()}
                self.stream: HostStream | RingStream = HostStream(self.dram, tensors, self.ledger)
                slots = self.arena.slice(self.host.cache_at, self.dram.slots * self.dram.slot_bytes).split(max(1, self.dram.slot_bytes))
                self._rehearsal = Rehearsal(tensors, lambda u: slots[u.layer % len(slots)])
            else:
                self._taken.callback(self.card.vram.close)
                self.stream, self._rehearsal = self.card.stream, self.card.rehearsal
            self._stack.callback(self.stream.close)
            self.experts = self._open_experts(skeleton)
            directory = skeleton.store.directory if options.kv_scratch_dir is None else options.kv_scratch_dir
            attending = self._attending if kv.attended else None
            self.outside = OutsideKv(kv, copies, host, self.card.kv_slots if self.card else [], copier, self.model, directory, attending)
            self._stack.callback(self.outside.close)
            self._binder = Binder(self.model, self.host.blocks, self._rehearsal)
            bind_fixtures(self.model, host, self.card, copier, device, self._binder)
            slots = kv.pages + (0 if self.outside.layers else options.page_room.vram_pages)
            self.kv = KvPool(slots, kv.page_tokens, kinds(self.model.config), device, self.outside.rehearse())
            self._taken.callback(self.kv.close)
            inputs, elsewhere, leading = self._open_inputs(), self.outside.attention, None if rank is None else rank.leading
            self.stepper = Stepper(self.model, device, self.kv, self._begin_pass, inputs, kernel, self._binder, elsewhere, leading)
            if rank is not None:
                rank.take_parts(self.stepper.paged, self.kv, (self._binder, self.outside), inputs.put)
            fed, far = FedStepper(self.stepper, self.model, self._binder, self._rehearsal), len(self.outside.layers)
            self.recording = StepRecording(fed, self.experts, host, copier, rank, self._begin_pass, far, kernel is not None)
            self.prompts = PromptRecording(fed, copier, options)
            self._handed: HandedSteps | None = None
            self.loading = Loading(host, self.card, copier)
            self._stack.callback(self.loading.close)
            self.longest = 0, 0
            """Rows of a recorded step, and tokens that each may come to hold: those of the largest rehearsal."""
        except BaseException:
            self.close()
            raise

    def _open_inputs(self) -> StepInputs:
        """Page-locked memory for a pass's numbers, where the machine locks pages for us."""
        if self.copier is None or self.device.type != "cuda" or self.arena.refused:
            return CopiedInputs(self.device)
        return MappedInputs(self.copier, self.device)

    def _begin_pass(self, step: Step) -> None:
        if self._rank is not None:
            self._rank.model.begin_pass(step)
        if self.experts is not None:
            self.experts.begin_pass(step)
        self.outside.begin_pass(step)
        self.prompts.begin_pass(step)
        if self._handed is not None and self._binder.stream is not self._rehearsal:
            self._binder.stream = self._handed.stream_of(step)
        self._binder.begin_pass()

    def _attending(self, regions: Mapping[int, torch.Tensor]) -> HostAttention:
        """What attends to layers of KV in DRAM, by threads of its own."""
        host, options = self.host, self.host.options
        assert self.copier is not None
        pool = pool_here(options.host_threads, options.host_ahead_bytes, options.tell)
        self._stack.callback(pool.close)
        locked, choice = self.device.type == "cuda", ScheduleChoice(options.schedules)
        return HostAttention(pool, regions, host.kv.rows, host.kv.page_tokens, self.copier, locked, self.ledger, options.tell, choice)

    def _open_experts(self, skeleton: Skeleton) -> Experts | None:
        host = self.host.experts
        if host is None:
            return None
        with uninterrupted():
            each = host.dram.slot_bytes
            slots = self.card.expert_slots if self.card else []
            places = slots or self.arena.slice(host.at, max(1, host.room.dram_slots) * each).split(each)
            experts = Experts(host, skeleton.layers, slots, places, self.copier, self.stream, self.ledger, self.host.options.record)
            self._stack.callback(experts.close)
        return experts

    def begin_loading(self) -> None:
        """Start to fill every place, on other threads."""
        self.host.begin_reading()  # DRAM then knows which experts it keeps
        self.loading.begin(self.experts.fills() if self.experts else [])

    def warm_up(self, batch: Batch) -> None:
        """Rehearse passes of ``batch``'s shape, those of one token first: KV memory is taken before activations, which then leave no holes
        between its parts. On the CPU that is enough: nothing is loaded on demand there."""
        longest = max(map(len, batch.prompts))
        for tokens in (1, longest) if self.copier else (1,):
            self.rehearse(replace(batch, prompts=[[0] * tokens] * len(batch.prompts)))
        self.longest = len(batch.prompts), max(self._most_tokens(batch), self._fitting(self.host.options.row_tokens, 1))
        if self.copier:
            meet_loose_rows(self.stepper, len(batch.prompts), self._most_tokens(batch))
        self.warm_up_experts(len(batch.prompts) * min(longest, batch.chunk_tokens))

    def warm_up_experts(self, tokens: int) -> None:
        """Meet the kernels of all products that a pass over ``tokens`` of prompts may have. Nothing on the CPU, and of a dense model."""
        if self.copier and self.experts is not None:
            with torch.inference_mode():
                self.experts.warm_up(tokens)

    def finish_loading(self, progress: Progress) -> None:
        """Return when every place is filled and the stream has started; the cache's first layers have arrived, unless asked not to wait."""
        self.loading.finish(progress)
        self._binder.stream = self.stream
        self.kv.put_outside(self.outside.begin(self.kv))
        if self.card is not None:
            self.card.ring.start()
        if self.experts is not None:
            self.experts.start()
        if self.card is not None and self.copier is not None:
            self._stack.callback(self.recording.close)
            self._stack.callback(self.prompts.close)
            with self.stepper.unled():
                self.recording.record(self.card, self.copier, *self.longest)
                self.prompts.record(*self.longest)
            hands_over = self._rank is not None or reads_layers(self._placement)
            if self._placement.host_units and hands_over and not self.recording.records:
                locked = self.device.type == "cuda"
                self._handed = open_handed(self.host, self.card, self.copier, locked, self.model, self._stack)
        if self.experts is not None:
            self.experts.stream()
        if self.copier is not None:
            self.stepper.launching = LaunchSeconds()

    def rehearse(self, batch: Batch) -> tuple[float, float]:
        """A prefill and two decode steps over whatever lies in the buffers -> seconds of the prefill and of the second step.

        Nothing moves meanwhile, so once kernels are loaded these are what computing alone takes. Before :meth:`finish_loading` or after
        :meth:`stop`. On the CPU the first rehearsal, with a short prompt, is enough: nothing is loaded on demand there.
        """
        self.compute_from_anywhere()
        self.recording.record_still()
        return rehearse(self.stepper, batch, self._most_tokens(batch))

    def compute_from_anywhere(self) -> None:
        """Passes are rehearsals from now on, until :meth:`finish_loading`: whatever lies in the buffers serves."""
        self._binder.stream = self._rehearsal
        if self._handed is not None:
            self._handed.rest()
        if self.experts is not None:
            self.experts.rehearse()
        self.kv.put_outside(self.outside.rehearse())

    def _most_tokens(self, batch: Batch) -> int:
        """That each sequence of ``batch`` may come to hold."""
        rows = len(batch.prompts)
        return self._fitting(self.host.kv.pages // rows * self.kv.page_tokens, rows)

    def _fitting(self, tokens: int, rows: int) -> int:
        """At most ``tokens`` of each of ``rows`` sequences, of a model that has a position for each, in a pool that has room for all."""
        config = self.model.config.get_text_config(decoder=True)
        known = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
        room = self.host.kv.pages // rows * self.kv.page_tokens
        return min([tokens, room, *(n for n in known if isinstance(n, int) and n > 0)])

    @property
    def page_memory(self) -> PageMemory:
        """What kept pages lie in and pass through, once a rehearsal has taken the pool."""
        at, nbytes = self.host.pages_at, self.host.options.page_room.dram_bytes
        buffers, bounce = self.kv.buffers() | self.outside.regions, self.card.bounce if self.card else None
        view, tensor = self.arena.view[at : at + nbytes], self.arena.slice(at, nbytes)
        return PageMemory(self.kv.pages, buffers, view, tensor, self.copier, bounce, self.host.options.keep_pool)

    @property
    def link_target(self) -> torch.Tensor | None:
        """The largest buffer of VRAM that something streams into; None when nothing does."""
        return max(self.card.streamed_into if self.card else (), key=torch.Tensor.numel, default=None)

    @property
    def reads_ssd(self) -> bool:
        """Whether passes read the SSD: layers, or experts that no tier has."""
        return bool(self._placement.ssd_layers) or (self.host.experts is not None and self.host.experts.room.reads)

    def stage_totals(self) -> dict[str, tuple[int, float]]:
        """Stage -> (bytes, busy seconds) since the engine was made."""
        self._settle()
        if self.experts is not None:
            self.experts.settle()
        totals = {name: (t.bytes, t.busy_s) for name, t in self.ledger.totals().items()}
        on_cpu = self.experts.on_cpu() if self.experts is not None else {}
        return {"ssd": (self.pool.meter.bytes, self.pool.meter.busy_seconds), **totals, **on_cpu}

    def track_totals(self) -> dict[str, tuple[int, float]]:
        """The same for the ledger's tracks, of which weights (``h2d``) and KV (``h2d.kv``) have one each on the link."""
        self._settle()
        return {name: (t.bytes, t.busy_s) for name, t in self.ledger.tracks().items()}

    def _settle(self) -> None:
        self.stream.settle()
        self.outside.book()
        if self._handed is not None:
            self._handed.settle()
        self.recording.settle()

    def facts(self) -> dict[str, Any]:
        """Counters for the report: the cache's hits, loads, evictions and waits, the ring's waits, the reader's retries."""
        return {
            "cache": asdict(self.dram.cache.stats),
            "ring": asdict(self._ring_stats) if self._ring_stats else None,
            "handed": self.handed_facts,
            "experts": self.experts.facts() if self.experts else None,
            "graphs": self.recording.facts(),
            "prompts": self.prompts.facts(),
            "launching": self.launching_facts,
            "arena": {"bytes": self.arena.nbytes, "page_locked_bytes": self.arena.locked_bytes, "refused": self.arena.refused},
            "stalls": self.pool.stalls.facts(),
            "ssd": {
                "reads": self.pool.meter.reads,
                "retries": self.pool.meter.retries,
                "direct_files": [str(f) for f in self.pool.direct_files],
                "buffered_files": [str(f) for f in self.pool.buffered_files],
            },
        }

    @property
    def launching_facts(self) -> dict[str, Any] | None:
        """Of passes that are launched kernel by kernel; None without a card."""
        return None if self.stepper.launching is None else self.stepper.launching.facts()

    @property
    def handed_facts(self) -> dict[str, Any] | None:
        """Of steps that hand units over to the CPU; None where none do."""
        return None if self._handed is None else self._handed.facts()

    @property
    def _ring_stats(self) -> RingStats | None:
        """Of prompts and steps; None without a card."""
        if self.card is None:
            return None
        return self.card.ring.stats if self._handed is None else self.card.ring.stats + self._handed.stats

    def stop(self) -> None:
        """End the stream: no unit moves any more, the pool and the arena may be used for something else."""
        self.outside.end()
        self.recording.stop()
        if self._handed is not None:
            self._handed.close()
        self.stream.close()
        if self.experts is not None:
            self.experts.close()

    def _give_back(self) -> None:
        """What was taken of the compute device, whoever still has a name for the model."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch._C._cuda_clearCublasWorkspaces()  # one for each stream that multiplied: the next engine has streams of its own
        self._taken.close()

    def close(self) -> None:
        """Stop threads, free page-locked memory and VRAM. Safe to call twice, and after a failure in the middle."""
        self._stack.close()
