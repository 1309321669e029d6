"""Both tiers of routed experts, filled by the SSD's lane and the link's, and what the CPU computes of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from penstock.planner.common.timeline.spans import CPU, EXPERTS, LAUNCH, SSD
from penstock.planner.contract.bills.prefill import Moved
from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.contract.experts.expert_caches import expert_caches, keep_first
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.missed_experts import host_split
from penstock.planner.contract.prices.price import Resource
from penstock.planner.simulate.lanes.expert_tier import Key, SimulatedTier, TierCounts
from penstock.planner.simulate.lanes.lanes import Lanes, Work, ns


class SimulatedExperts:
    """Both tiers of a plan's experts; without a GPU compute takes them from DRAM. :meth:`visit`, then :meth:`ready` and :meth:`used` until
    ``waiting`` is empty."""

    def __init__(self, plan: Plan, moved: Moved, lanes: Lanes):
        experts, made = plan.model.experts, plan.decisions.experts
        assert experts is not None and made is not None, "only a plan with routed experts is simulated so"
        pieces = experts.pieces(made.chunk_bytes)
        self._pieces = pieces
        reads, piece_bytes = plan.decisions.weights.ssd, experts.expert_bytes // pieces
        lanes.of[SSD].width = max(1, reads.queue_depth * reads.block_bytes // piece_bytes)  # blocks of as many are read at once
        self.waiting: dict[int, None] = {}
        """Experts of the visited layer that were not computed with."""
        self._given: dict[int, None] = {}
        """Of these, those that compute takes as soon as each is there, in this order: what was there, then as copies begin."""
        self._there: dict[int, None] = {}
        """Without a card, those that were there all along, in the order in which they free slots."""
        self._visited = (experts.layers[0], 0)
        self._far: dict[Key, int] = {}
        """Missed by both tiers: pieces that lie in DRAM and were not given to the link."""
        self._near: deque[Key] = deque()
        self._calling = False
        """Whether the host is still on its way to the first copy of the visit."""
        self._todo: deque[Key] = deque()
        self._wanted: Iterator[Key] | None = None
        self._wanted_in_dram: Iterator[Key] | None = None
        self._looked = True
        self._from_dram: set[Key] = set()
        """Of the visited layer, what DRAM was asked for."""

        def tier(cache: ExpertCache, track: str, seconds: float, in_order: bool, *arrived: Callable[[Key, bool], None]) -> SimulatedTier:
            return SimulatedTier(cache, track, ns(seconds / pieces), piece_bytes, pieces, made.in_flight, lanes, in_order, *arrived)

        self._visit_late_ns, self._late_ns = ns(moved.read_late_s), 0
        """By which a step's visit that reads takes longer, and what of it is to come."""
        self.computed_on_cpu = 0
        """Experts so far."""
        self._split = host_split(plan.hardware, plan.model, made, plan.decisions.batch)
        self._rows, self._expert_bytes = plan.decisions.batch, experts.expert_bytes
        self._lanes, self._copy_s = lanes, moved.expert_copied.of(Resource.h2d)
        self._on_cpu: dict[int, bool] = {}
        """Of the visited layer, what the CPU computes: whether it has."""
        vram, dram = expert_caches(experts, made, plan.hardware.gpu is not None)
        self.card = None if vram is None else tier(vram, EXPERTS, moved.expert_copied.of(Resource.h2d), True)
        self.dram = tier(dram, SSD, moved.expert_read.of(Resource.ssd), False, self._in_dram)
        keep_first(experts, vram, dram)

    @property
    def counts(self) -> dict[str, TierCounts]:
        """Tier -> what was found in it."""
        return {"vram": self.card.counts, "dram": self.dram.counts} if self.card else {"dram": self.dram.counts}

    @property
    def nearest(self) -> SimulatedTier:
        """The tier that compute takes experts from."""
        return self.card or self.dram

    def visit(self, layer: int, routing: Routing, called_ns: int = 0) -> None:
        """``layer``'s router has chosen. ``called_ns``: the host's for each expert that is copied from DRAM, before it queues their
        copies; what it asks the CPU for comes before that."""
        self._visited = layer, len(routing.experts)
        self._wanted = None
        self._looked = False
        wanted: Sequence[int] = routing.experts
        order: list[int] = []
        placed = False
        if self.card is not None:
            hits, wanted = self.card.visit(layer, routing, wanted)
            placed = self.card.cache.has_room(wanted)
            coming_to_card = self.card.coming
            order += sorted(hits, key=lambda e: (layer, e) in coming_to_card)
        hits, misses = self.dram.visit(layer, routing, wanted)
        self._from_dram = {(layer, e) for e in (*hits, *misses)}
        if self.card is None:  # what was there all along is computed while nothing else has come
            there = [e for e in hits if self.dram.here((layer, e))]
            on_way = [*(e for e in hits if not self.dram.here((layer, e))), *misses]
            self._there = dict.fromkeys(self.dram.cache.leaving_first(layer, there) if on_way else there)
            order = [*on_way, *self._there]
        else:
            order += [*(e for e in hits if self.dram.here((layer, e))), *(e for e in hits if not self.dram.here((layer, e))), *misses]
        near = [e for e in hits if self.dram.here((layer, e))] if self.card is not None else []
        self._begin_on_cpu(layer, routing, near)
        self.waiting = dict.fromkeys(sorted(order, key=self._on_cpu.__contains__))
        self._given = dict.fromkeys(order if self.card is None else order[: len(routing.experts) - len(wanted)])
        if self.card is not None:
            for expert in hits:
                coming = self.dram.coming.get((layer, expert))
                if coming is not None:
                    self._far[layer, expert] = self._pieces - coming.left
            self._far |= dict.fromkeys(((layer, e) for e in misses), 0)
            near, first = [e for e in near if e not in self._on_cpu], self.card.cache.free
            if self._far and len(near) > first:
                near[first:] = self.dram.cache.leaving_first(layer, near[first:])
            self._near.extend((layer, e) for e in near)
            if placed:
                self._given |= dict.fromkeys(near)
                for key in self._far:
                    self._begin_copy(key, 0)
            asked_ns = ns(self._split.asked_s) * len(self._on_cpu) if self._split else 0
            calls_ns = called_ns * len(self._near) + asked_ns
            self._calling = bool(calls_ns and self._near)
            if self._calling:
                calls = Work(("calls", layer), f"copies of layer {layer}", 0, partial(setattr, self, "_calling", False))
                self._lanes.add(LAUNCH, calls, calls_ns)
        self._todo.extend((layer, e) for e in misses)
        self._late_ns = 0 if routing.prompt or self._lanes.of[SSD].moving else self._visit_late_ns
        self._wanted_in_dram = self.dram.cache.coming(layer, len(routing.experts))

    def _begin_on_cpu(self, layer: int, routing: Routing, near: Sequence[int]) -> None:
        """Let the CPU compute its share of ``near``, missed experts that lie in DRAM."""
        split, card = self._split, self.card
        self._on_cpu = {}
        if split is None or card is None or routing.prompt or len(routing.chosen) > self._rows or not near:
            return
        rows = [int((routing.chosen == expert).any(1).sum()) for expert in near]
        queued = sum(coming.under_way for coming in card.coming.values()) / self._pieces
        taken = split.on_host(rows, queued * self._copy_s)
        self.dram.cache.set_aside([near[at] for at in taken])
        for n, at in enumerate(taken):
            expert, seconds = near[at], split.host_s[rows[at] - 1] + (0.0 if n else split.asked_s + split.hop_s)
            name = f"expert.{layer}.{expert}"
            work = Work(("expert", layer, expert), name, self._expert_bytes, partial(self._on_cpu.__setitem__, expert, True))
            self._on_cpu[expert] = False
            self._lanes.add(CPU, work, ns(seconds))
        self.computed_on_cpu += len(taken)

    def is_computed(self, expert: int) -> bool:
        """Whether the CPU has computed ``expert``."""
        return self._on_cpu.get(expert, False)

    def ready(self) -> int | None:
        """An expert that compute can take now, the first of the visit's order, in which the CPU's come last. Their results are taken
        early where nothing else is here: slots of DRAM that reads wait for may be theirs."""
        layer, _ = self._visited
        given = self._there if self._there and self.dram.cache.held_up else self._given
        here = (e for e in given if self.nearest.here((layer, e)))
        return next(chain(here, (e for e in self.waiting if self._on_cpu.get(e, False))), None)

    def ready_together(self) -> int | None:
        """The same once all of the visit's experts are there; before that only where some find no slots until others were computed with."""
        layer, _ = self._visited
        there = all(self._on_cpu[e] if e in self._on_cpu else self.nearest.here((layer, e)) for e in self.waiting)
        return self.ready() if there or self._wait_for_slots() else None

    def _wait_for_slots(self) -> bool:
        """Whether something of the visit finds no slot, of what comes from the SSD in either tier, and all that the host had copied of it
        has come."""
        layer, card = self._visited[0], self.card
        if card is None or self._calling:
            return False
        if any((layer, expert) in card.coming and (layer, expert) not in self._far for expert in self.waiting):
            return False
        if self._near:
            return not card.cache.free
        return bool(self._todo) or sum(key not in card.coming for key in self._far) > card.cache.free

    def copied_only(self) -> bool:
        """Whether nothing that the visit waits for comes from the SSD: the host has queued all of its copies."""
        return self.card is not None and not self._far and not self._todo

    def used(self, expert: int) -> None:
        """Computed with."""
        del self.waiting[expert]
        self._given.pop(expert, None)
        self._there.pop(expert, None)
        key = self._visited[0], expert
        if self.card is not None and expert not in self._on_cpu:
            self.card.settle(key)
        if key in self._from_dram:
            self.dram.settle(key)

    def go_on(self) -> bool:
        """Begin what can; whether that was anything."""
        did = False
        while self._todo and self.dram.begin(self._todo[0], True, self._pieces, self._late_ns):
            self._todo.popleft()
            self._late_ns = 0
            did = True
        if self.card is None:
            return self._look_ahead_in_dram() or did
        while self._near and not self._calling and self.card.cache.free:
            did = self._begin_copy(self._next_whole(), self._pieces)
        for key in [key for key, pieces in self._far.items() if pieces and not self._near]:
            if key not in self.card.coming and not self._begin_copy(key, 0):
                continue
            while self._far[key]:
                self._far[key] -= 1
                self.card.allow(key)
                did = True
                if key not in self.card.coming or self.card.coming[key].allowed == self._pieces:
                    del self._far[key]
                    break
        did = self._look_ahead_in_dram() or did
        if not self._near and not self._looked:
            self._looked = True
            self._wanted = self.card.cache.coming(*self._visited)
        if self._wanted is not None and self.card.cache.room_ahead and not self.card.ahead & set(self.card.coming):
            ahead = next(self._wanted, None)
            if ahead is None:
                self._wanted = None
            elif self.dram.here(ahead):
                self.card.begin(ahead, False, self._pieces)
            did = True
        return did

    def _next_whole(self) -> Key:
        """Of what lies in DRAM, the next to be copied: what the SSD has brought goes first. It reads on into the slots that this leaves."""
        for key, pieces in self._far.items():
            if pieces == self._pieces and key not in self.nearest.coming:
                del self._far[key]
                return key
        return self._near.popleft()

    def _begin_copy(self, key: Key, pieces: int) -> bool:
        """Let an expert come to the card, so many ``pieces`` of it at first; False while no slot is free."""
        if self.card is None or not self.card.begin(key, True, pieces):
            return False
        self._given[key[1]] = None
        return True

    def _look_ahead_in_dram(self) -> bool:
        did = False
        while not self._todo and self._wanted_in_dram is not None and self.dram.cache.room_ahead:
            key = next(self._wanted_in_dram, None)
            if key is None:
                self._wanted_in_dram = None
            else:
                did = self.dram.begin(key, False, self._pieces)
        return did

    def _in_dram(self, key: Key, last: bool) -> None:
        if self.card is not None and key in self._far:
            self._far[key] += 1
