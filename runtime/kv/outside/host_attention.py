"""Attention of decode steps over layers of KV where they lie in DRAM: queries and new rows come to the CPU, results go to the card."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from penstock.planner.common.timeline.spans import CPU
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.kv.attention.layer_views import LayerViews
from penstock.runtime.kv.attention.page_tables import PageTables, Traits, slots_of
from penstock.runtime.kv.attention.paged_host import HostKernel
from penstock.runtime.kv.attention.row_groups import packed
from penstock.runtime.kv.batch.token_shape import Pair, TokenShape
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.moving.ledger import Ledger

FLAG_WORDS = 16
"""Numbers of 32 bits: a line of the CPU's cache."""


class Mapped:
    """[rows, heads, dim] in page-locked memory, as the CPU sees it and as kernels do."""

    def __init__(self, shape: tuple[int, int, int], device: CopyDevice, locked: bool):
        nbytes = shape[0] * shape[1] * shape[2] * torch.bfloat16.itemsize
        held = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=locked)
        self.here, self.there = (one.view(torch.bfloat16).view(shape) for one in (held, device.alias(held)))


class Rows:
    """What crosses between card and CPU for layers of one shape, ``rows`` at most."""

    def __init__(self, rows: int, heads: int, shape: TokenShape, device: CopyDevice, locked: bool):
        query, out = (heads, shape.keys[1]), (heads, shape.values[1])
        sizes = (query, shape.keys, shape.values, out)
        self.query, self.key, self.value, self.out = (Mapped((rows, *size), device, locked) for size in sizes)


@dataclass(frozen=True)
class _Asked:
    """One layer of a pass; ``after``: its rows are there."""

    number: int
    layer: int
    tokens: int
    rows: Rows
    held: Pair
    is_new: bool
    tables: PageTables
    slots: torch.Tensor
    traits: Traits
    after: Event
    nbytes: int


class HostAttention:
    """Attends to ``regions``, the KV of some layers, in passes in which each of at most ``rows`` rows decodes one token.

    Kernels write queries and new K and V into page-locked memory and read results there: a small copy would queue behind those of other
    layers. A thread of this object waits for them, puts new rows to their places, and has ``pool`` attend. The card waits for a flag, so
    the host goes on to launch what comes behind. Sums are F32, where the card's kernel rounds weights to BF16.

    Costs rows * (2 * query width + 2 * KV width) * 2 bytes of page-locked DRAM, and 4 bytes for each row, query head, dimension and 256
    keys. ``tell`` gets the line that says why a layer cannot be attended to.
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
    ):
        self._pool, self._regions, self._most, self._page_tokens = pool, regions, rows, page_tokens
        self._device, self._locked, self._ledger, self._tell = device, locked, ledger, tell
        self._kernel = HostKernel(pool)
        self._flag = torch.zeros(FLAG_WORDS, dtype=torch.int32, pin_memory=locked)
        self._rows: dict[tuple[int, TokenShape], Rows] = {}
        self._views: dict[int, LayerViews] = {}
        self._asked = 0
        self._pass: tuple[PageTables, torch.Tensor, int] | None = None
        self.refused: str | None = None
        """Why it attends to nothing; None where it can."""
        self._error: BaseException | None = None
        self._queue: SimpleQueue[_Asked | None] = SimpleQueue()
        self._done = threading.Condition()
        self._answered = 0
        self._thread = threading.Thread(target=self._answer_all, name="penstock-attention", daemon=True)
        self._thread.start()

    def serves(self, step: Step) -> bool:
        """Whether ``step`` is attended to here."""
        decodes = all(row.kind is RowKind.decode and len(row.tokens) == 1 for row in step.rows)
        return self.refused is None and decodes and len(step.rows) <= self._most

    def begin_pass(self, step: Step | None) -> None:
        """``step`` comes next, which is served; None: a pass that is not. Raises what the last one failed of."""
        if self._error is not None:
            raise self._error
        self._pass = None
        if step is not None:
            tables = PageTables.of(packed(step), self._page_tokens, torch.tensor)
            self._pass = tables, slots_of(step, self._page_tokens, torch.tensor), sum(row.end for row in step.rows)
            self._pool.near()

    def attend(self, layer: int, shape: TokenShape, query: torch.Tensor, new: Pair | None, traits: Traits | None) -> torch.Tensor | None:
        """[tokens, heads, dim], and new K and V [1, heads, tokens, dim] or None where an earlier layer wrote them -> [tokens, heads, dim of
        V] on the device, for kernels issued from now on. None: it is computed there."""
        if self._pass is None or layer not in self._regions:
            return None
        if traits is None or traits.sinks is not None or traits.slopes is not None or not self._kernel.takes(query, shape):
            self._refuse(layer)
            return None
        tables, slots, seen = self._pass
        tokens, rows = len(query), self._rows_of(query.shape[1], shape)
        torch.mul(query, 1, out=rows.query.there[:tokens])
        for to, states in zip((rows.key, rows.value), new or (), strict=False):
            torch.mul(states[0].transpose(0, 1), 1, out=to.there[:tokens])
        views = self._views.setdefault(layer, LayerViews(shape))
        held = views.pair(self._regions[layer][: self._regions[layer].numel() // shape.nbytes * shape.nbytes])
        self._asked += 1
        after, nbytes = self._device.compute_event(), seen * shape.nbytes
        self._queue.put(_Asked(self._asked, layer, tokens, rows, held, new is not None, tables, slots, traits, after, nbytes))
        self._device.compute_waits_for(self._flag, self._asked)
        return torch.mul(rows.out.there[:tokens], 1)

    def settle(self) -> None:
        """Block until all that was asked is answered. From any thread."""
        with self._done:
            self._done.wait_for(lambda: self._answered == self._asked)

    def close(self) -> None:
        """End the thread, behind what was asked. Safe to call twice."""
        self._queue.put(None)
        self._thread.join()

    def _refuse(self, layer: int) -> None:
        self._pass = None
        self.refused = f"the CPU has no attention such as layer {layer}'s: all layers of KV in DRAM are copied to the card"
        self._tell(self.refused)

    def _rows_of(self, heads: int, shape: TokenShape) -> Rows:
        if (heads, shape) not in self._rows:
            self._rows[heads, shape] = Rows(self._most, heads, shape, self._device, self._locked)
        return self._rows[heads, shape]

    def _answer_all(self) -> None:
        while (asked := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._answer(asked)
                except BaseException as error:  # raised where the next pass begins; the card must not wait for ever
                    self._error = error
            self._flag[0] = asked.number
            with self._done:
                self._answered = asked.number
                self._done.notify_all()

    @torch.inference_mode()
    def _answer(self, asked: _Asked) -> None:
        self._device.host_waits(asked.after)
        begun, rows = time.perf_counter(), asked.rows
        if asked.is_new:
            for states, new in zip(asked.held, (rows.key, rows.value), strict=True):
                states.index_copy_(0, asked.slots, new.here[: asked.tokens])
        self._kernel.attend(rows.query.here[: asked.tokens], asked.held, asked.tables, asked.traits, rows.out.here[: asked.tokens])
        self._ledger.add(CPU, f"kv.{asked.layer}", begun, time.perf_counter(), asked.nbytes)
