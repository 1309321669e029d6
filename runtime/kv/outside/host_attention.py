"""Attention of decode steps over layers of KV where they lie in DRAM: queries and new rows come to the CPU, results go to the card."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from penstock.planner.common.timeline.spans import CPU
from penstock.planner.contract.policy.schedule_choice import ScheduleChoice
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.beside.host_serve import FLAG_WORDS
from penstock.runtime.kv.attention.layer_views import LayerViews
from penstock.runtime.kv.attention.page_tables import PageTables, Traits, slots_of
from penstock.runtime.kv.attention.paged_host import HostKernel
from penstock.runtime.kv.attention.row_groups import packed
from penstock.runtime.kv.batch.token_shape import Pair, TokenShape
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.moving.ledger import Ledger

WARMING = 2
"""Steps behind a prompt that have begun before one is judged."""
_HALF = 2**31


class Mapped:
    """[rows, heads, dim] in page-locked memory, as the CPU sees it and as kernels do."""

    def __init__(self, shape: tuple[int, int, int], device: CopyDevice, locked: bool):
        nbytes = shape[0] * shape[1] * shape[2] * torch.bfloat16.itemsize
        held = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=locked)
        self.here, self.there = (one.view(torch.bfloat16).view(shape) for one in (held, device.alias(held)))


class Rows:
    """What crosses between card and CPU for layers of one shape, ``rows`` at most."""

    def __init__(self, rows: int, heads: int, shape: TokenShape, device: CopyDevice, locked: bool):
        sizes = ((heads, shape.keys[1]), shape.keys, shape.values, (heads, shape.values[1]))
        self.query, self.key, self.value, self.out = (Mapped((rows, *size), device, locked) for size in sizes)


class Attended(NamedTuple):
    """A layer that threads attend to, or did: ``times`` [2], int64, ns, are its begin and end, 0 before. ``kept`` is what they read."""

    layer: int
    nbytes: int
    times: torch.Tensor
    kept: tuple[object, ...]


class HostAttention:
    """Attends to ``regions``, the KV of some layers, in passes in which each of at most ``rows`` rows decodes one token.

    Kernels write queries and new K and V into page-locked memory, and read results there: a small copy would queue behind those of other
    layers. Two words order both sides. The card writes the one when rows are there, for which ``pool``'s threads look, and waits until they
    have written the other. So the host launches what comes behind while the CPU attends, on a core that those threads leave.

    Costs rows * (2 * query width + 2 * KV width) * 2 bytes of page-locked DRAM, and 4 bytes for each row, query head, dimension and 256
    keys. ``tell`` gets the line that says why a layer cannot be attended to, or that steps follow another of ``choice``'s schedules: by
    its first one this attends, by any other nothing does.
    """

    def __init__(
        self,
        pool: HostPool,
        regions: Mapping[int, torch.Tensor],
        rows: int,
        page_tokens: int,
        device: CopyDevice,
        locked: bool,
        ledger: Ledger,
        tell: Callable[[str], None],
        choice: ScheduleChoice,
    ):
        self._pool, self._regions, self._most, self._page_tokens = pool, regions, rows, page_tokens
        self._device, self._locked, self._ledger, self._tell = device, locked, ledger, tell
        self._kernel = HostKernel(pool)
        self._choice = choice
        self._steps, self._begun_s = 0, 0.0
        """Steps behind the last prompt, and when the last one began."""
        self._rows: dict[tuple[int, TokenShape], Rows] = {}
        self._views: dict[int, LayerViews] = {}
        self._pass: tuple[PageTables, torch.Tensor, int] | None = None
        self._ask, self._done = (torch.zeros(FLAG_WORDS, dtype=torch.int32, pin_memory=locked) for _ in range(2))
        self._turn = 0
        """Layers so far: what both words become."""
        self._asked: deque[Attended] = deque()
        """That are not booked yet."""
        self._lock = threading.Lock()
        self.refused: str | None = None
        """Why it attends to nothing; None where it can."""

    def begin_pass(self, step: Step, live: bool) -> bool:
        """``step`` comes next, in a rehearsal unless ``live`` -> whether it is attended to here."""
        self.book()
        self._pass = None
        decodes = all(row.kind is RowKind.decode and len(row.tokens) == 1 for row in step.rows)
        if self.refused is not None or not decodes or len(step.rows) > self._most:
            self._steps = 0
            return False
        if live and not self._by_plan():
            return False
        tables = PageTables.of(packed(step), self._page_tokens, torch.tensor)
        self._pass = tables, slots_of(step, self._page_tokens, torch.tensor), sum(row.end for row in step.rows)
        return True

    def _by_plan(self) -> bool:
        """A step comes -> whether it follows the plan's schedule. The step before is judged, unless it was the first behind a prompt, which
        waits for the streams to fill."""
        now, before = time.perf_counter(), self._begun_s
        self._steps, self._begun_s = self._steps + 1, now
        said = self._choice.took(now - before) if self._steps > WARMING else None
        if said is not None:
            self._tell(said)
        return self._choice.current is self._choice.schedules[0]

    def attend(self, layer: int, shape: TokenShape, query: torch.Tensor, new: Pair | None, traits: Traits | None) -> torch.Tensor | None:
        """[tokens, heads, dim], and new K and V [1, heads, tokens, dim] or None where an earlier layer wrote them -> [tokens, heads, dim of
        V] on the device, for kernels issued from now on, which wait for the CPU. None: it is computed there."""
        if self._pass is None or layer not in self._regions:
            return None
        if traits is None or traits.sinks is not None or traits.slopes is not None or not self._kernel.takes(query, shape):
            self._refuse(layer)
            return None
        tokens, rows = len(query), self._rows_of(query.shape[1], shape)
        self._have_attended(layer, shape, rows, tokens, new is not None, traits)
        try:
            torch.mul(query, 1, out=rows.query.there[:tokens])
            for to, states in zip((rows.key, rows.value), new or (), strict=False):
                torch.mul(states[0].transpose(0, 1), 1, out=to.there[:tokens])
            self._device.compute_writes(self._ask, self._turn)
        except BaseException:
            self._ask[0] = self._turn  # nobody asks any more: threads must not wait for it
            raise
        self._device.compute_waits_for(self._done, self._turn)
        return torch.mul(rows.out.there[:tokens], 1)

    def _have_attended(self, layer: int, shape: TokenShape, rows: Rows, tokens: int, brings: bool, traits: Traits) -> None:
        """Threads attend to ``layer`` with the rows that come, when they are asked. ``brings``: whether new K and V come, too."""
        assert self._pass is not None
        (tables, slots, seen), held = self._pass, self._held(layer, shape)
        asked = self._kernel.asked(rows.query.here[:tokens], held, tables, traits, rows.out.here[:tokens])
        if brings:
            asked.new_keys, asked.new_values, asked.places = (one.data_ptr() for one in (rows.key.here, rows.value.here, slots))
        times = torch.zeros(2, dtype=torch.int64)
        self._turn = (self._turn + 1 + _HALF) % (2 * _HALF) - _HALF  # both sides count on from the largest int32 to the least
        self._pool.attend_asked(asked, self._ask.data_ptr(), self._done.data_ptr(), self._turn, times.data_ptr())
        with self._lock:
            self._asked.append(Attended(layer, seen * shape.nbytes, times, (tables, slots, rows)))

    def book(self) -> None:
        """Book what is over. From any thread."""
        with self._lock:
            while self._asked and self._asked[0].times[1]:
                layer, nbytes, times, _ = self._asked.popleft()
                begun_ns, ended_ns = times.tolist()
                self._ledger.add(CPU, f"kv.{layer}", begun_ns / 1e9, ended_ns / 1e9, nbytes)

    def settle(self) -> None:
        """Block until new K and V lie where they belong. Between passes, from any thread."""
        self._device.host_waits(self._device.compute_event())
        self.book()

    def _held(self, layer: int, shape: TokenShape) -> Pair:
        region = self._regions[layer]
        whole = region[: region.numel() // shape.nbytes * shape.nbytes]
        return self._views.setdefault(layer, LayerViews(shape)).pair(whole)

    def _refuse(self, layer: int) -> None:
        self._pass = None
        self.refused = f"the CPU has no attention such as layer {layer}'s: all layers of KV in DRAM are copied to the card"
        self._tell(self.refused)

    def _rows_of(self, heads: int, shape: TokenShape) -> Rows:
        if (heads, shape) not in self._rows:
            self._rows[heads, shape] = Rows(self._most, heads, shape, self._device, self._locked)
        return self._rows[heads, shape]
