"""Which experts a tier holds, and in which of its slots: decisions alone, without bytes, threads or clocks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, filterfalse
from typing import NamedTuple

import numpy as np

from penstock.planner.contract.experts.expert_misses import ALL_ASKED
from penstock.planner.contract.experts.policies import ExpertPolicy, FarSight
from penstock.planner.contract.experts.prefetch import NOTHING, Prefetch

ALONE_WORTH = 2.0
"""How many times its worth an expert counts in VRAM that DRAM does not keep: to bring it back takes a read beside the copy.

A read takes three to eight times as long as a copy. With more than 2, VRAM would keep what it holds alone and no longer what is used. With
2 a token's copies and reads together take less time than with 1, or 3 % more at most (docs/log.md, 2026-11-24).
"""


class Routing:
    """What a layer's router chose; nobody changes it. A plain one: to make a frozen one takes a step's host twice as long."""

    __slots__ = ("ahead", "chosen", "experts", "prompt")

    def __init__(self, chosen: np.ndarray, prompt: bool, ahead: np.ndarray | None = None):
        """``chosen`` [tokens, top_k]: experts, each token's likeliest first. ``prompt``: whether these are tokens of prompts, not one
        decode step. ``ahead`` [layers, experts]: scores of the MoE layers after this one, the nearest first; see
        :class:`contract.experts.policies.AheadScores`."""
        self.chosen, self.prompt, self.ahead = chosen, prompt, ahead
        self.experts: list[int] = chosen[0].tolist() if len(chosen) == 1 else list(dict.fromkeys(chosen.ravel().tolist()))
        """All different, the first token's first."""


class Visit(NamedTuple):
    """What a layer's visit finds: ``hits``, first those whose slots are wanted back, then those kept, and ``misses``. ``dropped`` are the
    slots of experts that were fetched ahead for it in vain."""

    hits: tuple[int, ...]
    misses: tuple[int, ...]
    dropped: tuple[int, ...]


class _Ranks(NamedTuple):
    """In which order experts of a layer are let go: those of the least worth first, of equals the one with the highest number."""

    worths: Sequence[float]
    first: set[int] | frozenset[int]
    """These go before all others."""

    def worth(self, expert: int) -> float:
        return -math.inf if expert in self.first else self.worths[expert]

    def place(self, expert: int) -> tuple[float, int]:
        """What goes earlier has less."""
        return self.worth(expert), -expert

    def ordered(self, experts: Collection[int]) -> list[int]:
        """``experts``, what goes earlier before the others."""
        if self.first:
            return sorted(experts, key=self.place)
        return sorted(sorted(experts, reverse=True), key=self.worths.__getitem__)

    def least(self, kept: Collection[int], otherwise: int) -> int:
        """Of ``kept``, the one that goes first; to list all experts' ranks takes ten times as long."""
        first = self.first and self.first.intersection(kept)
        if first:
            return max(first)
        return min(sorted(kept, reverse=True), key=self.worths.__getitem__, default=otherwise)


class ExpertCache:
    """``slots`` of one tier. Every layer keeps up to its quota of its ``count`` experts; the other slots are for experts in transit.

    The calls of a visit, in order:

    * :meth:`find` says which experts are here;
    * :meth:`take` gives a slot to each missing expert, so that its copy can start;
    * :meth:`judge` asks the policy, while copies are in flight;
    * :meth:`settle` follows each expert's use.

    ``settle`` keeps the experts of highest worth among those held and those just used, in whatever order they are used. An expert that came
    through a transit slot stays in that slot. An evicted expert gives its slot once it was used itself; nobody gets the slot before
    :meth:`give_back`.

    Experts that the tier ``above`` will keep behind a visit are evicted here first. If this tier has more slots a layer, it spares the one
    that ``above`` will evict next: else both tiers would lose it. ``above`` in turn counts an expert that this tier does not keep
    :data:`ALONE_WORTH` times: it would have to be read again. Let S < L be the slots a layer of both tiers. Together they miss no more
    than one tier of L + S / 2 slots (tests/planner/test_routing_hits.py).
    """

    def __init__(
        self, quotas: Mapping[int, int], slots: int, count: int, policy: ExpertPolicy,
        above: ExpertCache | None = None, far: FarSight | None = None, ahead: Prefetch = NOTHING,
    ):  # fmt: skip
        """``far``: of layers beyond the next; the tier with none above it shows it what is used. ``ahead``: of each coming layer.
        ``policy`` may be that of the tier ``above``: it is shown each visit once."""
        self._quotas = dict(quotas)
        self._count = count
        self._policy, self._far, self._ahead = policy, far, ahead
        self._above = above
        self._below: ExpertCache | None = None
        if above is not None:
            above._below = self
        self._order = tuple(quotas)
        self._place = {layer: i for i, layer in enumerate(self._order)}
        self._after = dict(zip(self._order, (*self._order[1:], self._order[0]), strict=True))
        self._kept: dict[int, dict[int, int]] = {layer: {} for layer in self._order}
        self._passing: dict[int, dict[int, int]] = {layer: {} for layer in self._order}
        self._slots: dict[int, dict[int, int]] = {layer: {} for layer in self._order}
        """Of those kept and those passing: a visit asks for slots alone more often than which they are."""
        self._free = deque(range(slots))
        self._whole = sum(quotas.values()) == slots
        self._vacant = sum(quotas.values())
        self._held = memoryview(bytearray(len(quotas) * count)) if far is None or above is not None else far.held
        """[layers x experts]: whether :meth:`slot` has one."""
        times = bytearray(4 * len(quotas) * count)
        self._times = np.frombuffer(times, np.float32).reshape(len(quotas), count)
        """[layers, experts]: how many times its worth the tier above counts each: once what is kept here."""
        self._times[:], self._times_at = ALONE_WORTH, memoryview(times).cast("f")
        self._worth = np.zeros(count, np.float32)
        self._worths: Sequence[float] | None = None
        """The same as Python reads it, one by one; None until somebody asks."""
        self._judged: Routing | None = None
        """What the policy was shown last."""
        self._unused: set[int] = set()
        """Of the layer visited last, experts that were kept and are about to be used."""
        self._late: list[int] = []
        """Those that were used and wait for one of them to go."""
        self._aside: Collection[int] = ()
        """Of the layer visited last, experts that do not pass through the tier above."""
        self._first: set[int] | frozenset[int] | None = None
        """Of it, experts that go before all others; None until somebody asks."""

    @property
    def still(self) -> bool:
        """Whether nothing comes or goes any more: what has a slot here is kept in it."""
        return self._whole and not self._vacant

    @property
    def free(self) -> int:
        """Slots that :meth:`take` can give."""
        return len(self._free)

    @property
    def held_up(self) -> bool:
        """Whether an expert that was used has its slot still, until the one that it is kept instead of is used, too."""
        return bool(self._late)

    @property
    def room_ahead(self) -> bool:
        """Whether one more expert may be fetched ahead: a demand then still finds a slot that no layer is about to keep."""
        return len(self._free) > (0 if self._whole else self._vacant + 1)

    def has_room(self, missed: Collection[int]) -> bool:
        """Whether each of ``missed``, what a visit just did not find, can have a slot at once. It gets one then, before anything is fetched
        ahead for later layers: one token's experts are computed together, when the last of them has come."""
        return len(missed) <= len(self._free)

    @property
    def looks_ahead(self) -> bool:
        """Whether experts may be fetched that no router has asked for, of layers whose experts are not all used."""
        return self._ahead.most > 0

    def slot(self, layer: int, expert: int) -> int | None:
        """Where ``expert`` lies, or is on its way to; None when it is not held."""
        return self._slots[layer].get(expert)

    def slots(self, layer: int, experts: Sequence[int]) -> list[int]:
        """:meth:`slot` of each of ``experts``, which are held."""
        return [*map(self._slots[layer].__getitem__, experts)]

    def keeps(self, layer: int, expert: int) -> bool:
        """Whether ``expert`` lies in a slot of its layer's own."""
        return expert in self._kept[layer]

    def find(self, layer: int, wanted: Sequence[int]) -> Visit:
        """``layer`` is about to use experts, ``wanted`` of them from this tier."""
        kept, passing = self._kept[layer], self._passing[layer]
        is_kept = kept.__contains__
        hits, rest = tuple(filter(is_kept, wanted)), tuple(filterfalse(is_kept, wanted))
        self._unused, self._aside, self._first = set(hits), (), None
        if not passing:
            return Visit(hits, rest, ())
        dropped = [self._let_go(passing, layer, expert) for expert in [*passing] if expert not in rest]
        came = [e for e in rest if e in passing]
        return Visit((*came, *hits), tuple([e for e in rest if e not in passing]), tuple(dropped))

    def set_aside(self, experts: Collection[int]) -> None:
        """Of the layer visited last, ``experts`` are computed where they lie in this tier: the one above does not get them."""
        self._aside, self._first = experts, None

    def judge(self, layer: int, routing: Routing) -> None:
        """Show the policy what ``layer`` uses; where every expert has a slot there is nothing to decide."""
        if self._whole:
            return
        place, above = self._place[layer], self._above
        if above is None or above._policy is not self._policy or above._judged is not routing:
            self._show(place, routing)
        self._judged = routing
        self._worth, self._worths = self._policy.worth(place), None
        if self._below is not None and not self._below.still:
            self._worth = self._worth * self._below._times[place]

    def _show(self, place: int, routing: Routing) -> None:
        if routing.prompt:
            self._policy.study(place, routing.chosen)
        else:
            self._policy.observe(place, routing.experts, None if routing.ahead is None else routing.ahead[0])
        if self._far is not None and self._above is None:
            if routing.prompt:
                self._far.forget()
            else:
                self._far.observe(place, routing.experts, routing.ahead)

    def take(self, layer: int, expert: int) -> int | None:
        """A slot for ``expert``, which is not held; None while none is free."""
        if not self._free:
            return None
        slot = self._passing[layer][expert] = self._slots[layer][expert] = self._free.popleft()
        self._held[self._place[layer] * self._count + expert] = 1
        return slot

    def take_all(self, layer: int, experts: Sequence[int]) -> list[int]:
        """:meth:`take` of each of ``experts``; as many slots are free."""
        passing, slots, free, held = self._passing[layer], self._slots[layer], self._free, self._held
        begin, taken = self._place[layer] * self._count, []
        for expert in experts:
            slot = passing[expert] = slots[expert] = free.popleft()
            held[begin + expert] = 1
            taken.append(slot)
        return taken

    def keep(self, layer: int, expert: int) -> int | None:
        """A slot for ``expert`` before the first visit, if its layer still has one of its own."""
        if len(self._kept[layer]) >= self._quotas[layer]:
            return None
        self._vacant -= 1
        slot = self._kept[layer][expert] = self._slots[layer][expert] = self._free.popleft()
        self._held[self._at(layer, expert)] = 1
        self._times_at[self._at(layer, expert)] = 1.0
        return slot

    def settle(self, layer: int, expert: int) -> list[int]:
        """``expert`` of the layer visited last was used: keep it or let it go. The slots that are let go: there may be none, or two."""
        return self.settle_all(layer, (expert,))

    def settle_all(self, layer: int, experts: Sequence[int]) -> list[int]:
        """:meth:`settle` for each of ``experts``, in this order."""
        kept = self._kept[layer]
        if not self._late and kept.keys() >= {*experts}:
            self._unused.difference_update(experts)
            return []
        let_go, ranks = [], None
        for expert in experts:
            if expert not in kept:
                self._late.append(expert)
            else:
                self._unused.discard(expert)
            waiting, self._late = self._late, []
            for used in waiting:
                if ranks is None and len(kept) >= self._quotas[layer]:
                    ranks = self._ranks(layer)  # the tier above changes nothing meanwhile
                slot = self._settled(layer, used, ranks)
                if slot is not None:
                    let_go.append(slot)
        return let_go

    def _settled(self, layer: int, expert: int, ranks: _Ranks | None) -> int | None:
        """The slot that is let go for ``expert``, which came through a passing one; None for none, or for one that is still to be used.
        ``ranks`` are there where all slots of the layer's own are taken."""
        kept, passing = self._kept[layer], self._passing[layer]
        if ranks is not None:
            least = ranks.least(kept, expert)
            if ranks.place(least) >= ranks.place(expert):
                return self._let_go(passing, layer, expert)
            if least in self._unused:
                self._late.append(expert)
                return None
            slot = self._let_go(kept, layer, least)
        else:
            slot, self._vacant = None, self._vacant - 1
        kept[expert] = passing.pop(expert)
        self._times_at[self._at(layer, expert)] = 1.0
        return slot

    def _let_go(self, places: dict[int, int], layer: int, expert: int) -> int:
        """The slot of ``expert``, which is in ``places`` no more."""
        at = self._at(layer, expert)
        self._held[at], self._times_at[at] = 0, ALONE_WORTH
        del self._slots[layer][expert]
        return places.pop(expert)

    def _ranks(self, layer: int) -> _Ranks:
        """Of the experts of the layer visited last."""
        if self._worths is None:
            self._worths = self._worth.data
        if self._first is None:
            self._first = self._first_of(layer)
        return _Ranks(self._worths, self._first)

    def _first_of(self, layer: int) -> set[int] | frozenset[int]:
        """Those that the tier above will keep behind this visit, but for the one that goes next there. It is the same whenever in the
        visit it is asked: both tiers let go of slots as reads come, and decide alike in whatever order these do."""
        above, judged = self._above, self._judged
        if above is None or judged is None:
            return frozenset()
        first = above._kept_behind(layer, [expert for expert in judged.experts if expert not in self._aside])
        if self._quotas[layer] > above._quotas[layer] > 1:
            first.discard(above._ranks(layer).least(first, -1))
        return first

    def _kept_behind(self, layer: int, used: Sequence[int]) -> set[int]:
        """What is kept once ``used`` of the layer visited last have been settled, of which some may have been by now."""
        found = {*self._kept[layer], *used}
        over = len(found) - self._quotas[layer]
        if over > 0:
            found.difference_update(self._ranks(layer).ordered(found)[:over])
        return found

    def leaving_first(self, layer: int, experts: Sequence[int]) -> list[int]:
        """``experts`` of the layer visited last, which are here and will be used, in the order in which they free slots: first those that
        pass through, then those kept, of the least worth first. What comes to be kept instead of one waits until that was used."""
        ranks, kept = self._ranks(layer), self._kept[layer]
        return sorted(experts, key=lambda expert: (expert in kept, ranks.place(expert)))

    def give_back(self, slot: int) -> None:
        """Nothing reads or writes ``slot`` any more."""
        self._free.append(slot)

    def coming(self, layer: int, touched: int) -> Iterator[tuple[int, int]]:
        """(layer, expert) to fetch ahead of routers after that of ``layer``, of which ``touched`` experts are used; what neither tier has
        when its turn comes. All of the next MoE layer where those are nearly all, else as many as may be, the nearest layer's first.
        Nothing where there is but one MoE layer."""
        after = self._after[layer]
        if after == layer:
            return iter(())
        if self.is_dense(touched):
            return ((after, expert) for expert in range(self._count) if not self._has(after, expert))
        most = self._ahead.most
        if not most:
            return iter(())
        odds = self._policy.foresee(self._place[after])
        likely = [e for e in (odds >= self._ahead.least_chance).nonzero()[0].tolist() if not self._has(after, e)]
        if len(likely) > 1:
            likely.sort(key=odds.__getitem__, reverse=True)
        near = [(after, e) for e in likely[:most]]
        return iter(near) if self._far is None else chain(near, self._farther(self._far, layer, most))

    def _farther(self, far: FarSight, layer: int, most: int) -> Iterator[tuple[int, int]]:
        for place, expert in far.named(self._place[layer], most):
            if not self._has(self._order[place], expert):
                yield self._order[place], expert

    def is_dense(self, touched: int) -> bool:
        """Whether a visit of ``touched`` experts counts as one of all."""
        return touched >= ALL_ASKED * self._count

    def is_last(self, layer: int) -> bool:
        """Whether the MoE layer after ``layer`` is the next pass's first."""
        return layer == self._order[-1]

    def _has(self, layer: int, expert: int) -> bool:
        """Whether ``expert`` lies, or is on its way, in this tier or the one above."""
        at = self._at(layer, expert)
        return bool(self._held[at]) or (self._above is not None and bool(self._above._held[at]))

    def _at(self, layer: int, expert: int) -> int:
        return self._place[layer] * self._count + expert
