"""Pages of a rank that follows lie where rank 0 says, on a card whose streams run in any order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from penstock.runtime.kv.disk.page_writer import DiskWriter
from penstock.runtime.kv.pages.prefix import Prefix
from penstock.runtime.ranks.dealt_pages import LedPages, PagesElsewhere
from penstock.runtime.ranks.followers import Leading
from tests.runtime.kv.batches import SHAPE, AsyncDevice, Served, page_memory
from tests.runtime.kv.test_prefix import on_card
from tests.support import decisions, plan_for


@dataclass
class Follower:
    """What rank 0 tells comes as it would over a wire."""

    led: LedPages
    said: list[str] = field(default_factory=list)

    def tell_pages(self, do: str, **words: Any) -> None:
        self.said.append(do)
        assert self.led.do(json.loads(json.dumps({"do": do} | words))) is None

    def ask_pages(self, do: str, **words: Any) -> list[dict[str, Any]]:
        self.said.append(do)
        return [json.loads(json.dumps(self.led.do(json.loads(json.dumps({"do": do} | words)))))]


@dataclass
class Both(Served):
    """Rank 0, and one that computes what it computes in the same slots of a pool of its own."""

    beside: Served | None = None

    def _work(self, on: Callable[[torch.Tensor, int], object]) -> None:
        super()._work(on)
        if self.beside is not None:
            self.beside._work(on)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("card", [False, True], ids=["cpu", "card"])
def test_what_is_restored_on_two_ranks_is_what_each_computed(checkpoint: Path, tmp_path: Path, card: bool, seed: int) -> None:
    draw = random.Random(seed)
    plan = plan_for(checkpoint, decisions(batch=2))
    stems = [[draw.randrange(250) for _ in range(80)] for _ in range(3)]
    with ExitStack() as stack:
        ranks = []
        for rank, dram in ((0, 5), (1, 4)):
            device = AsyncDevice(draw.choice) if card else None
            memory = page_memory(SHAPE, 24, dram, device, 2)
            disk = stack.enter_context(DiskWriter(tmp_path / str(rank), SHAPE, 64 << 20, 1 << 20, queue_pages=8, warn=lambda line: None))
            ranks.append((memory, disk, device))
        (memory, disk, device), (memory_led, disk_led, device_led) = ranks
        led = stack.enter_context(closing(LedPages(SHAPE, memory_led, disk_led, 2, lambda: None, warn=lambda line: None)))
        follower = Follower(led)
        others = PagesElsewhere(cast(Leading, follower))
        whole = on_card(plan) if card else plan
        prefix = stack.enter_context(closing(Prefix(SHAPE, whole, memory, disk, 1e9, 2, warn=lambda line: None, others=others)))
        both = Both(prefix, memory, device, beside=Served(prefix, memory_led, device_led))
        restored = 0
        for turn in range(8):
            prompts = [[*draw.choice(stems)[: draw.randrange(20, 80)], turn, draw.randrange(250)] for _ in range(2)]
            restored += sum(both.batch(prompts, [[1, 2], [3]]))
            if turn == 3:
                prefix.flush()
                prefix.forget()
            if turn == 5:
                others.flush(9.0)
                if device_led is not None:
                    device_led.drain()
                memory_led.tensor.add_(1)  # all that this rank has in DRAM is damaged
        for each in (device, device_led):
            if each is not None:
                each.drain()
        assert restored > 200 and {"find", "bring", "put_by", "flush"} <= set(follower.said)
    assert memory.pool.free == 24
