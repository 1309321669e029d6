"""What `planner probe` asks of the CPU's attention, with copies that are played."""

from __future__ import annotations

from types import TracebackType

import pytest
import torch

from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.timed import attention_times
from penstock.runtime.timed.attention_times import DIM, KV_HEADS, KvLayers, attention
from penstock.runtime.timed.copies import Copying


class Played(Copying):
    """Copies of 40 GB/s; ``begun`` counts how often they were."""

    begun = 0

    def __enter__(self) -> Played:
        Played.begun += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def gbps_within(self, start: float, end: float) -> float:
        assert end > start
        return 40.0


@pytest.mark.parametrize("copies", [None, Played])
def test_attention_is_timed_alone_and_beside_copies_where_there_are_any(copies, monkeypatch):
    layer = 2 * 2 * 96 * KV_HEADS * DIM * 2
    rates = iter([80.0, 60.0])
    with HostPool(1) as pool:
        layers = KvLayers(2, 96, torch.zeros(3 * layer, dtype=torch.uint8))
        assert len(layers.held) == 3 and layers.attention_gbps(pool, 0.0) > 0
        monkeypatch.setattr(attention_times.KvLayers, "attention_gbps", lambda *_: next(rates))
        before = Played.begun
        told = dict(attention(pool, layers, 0.01, copies, 50.0))
    assert told == {"attention_gbps": 80.0} | ({"attention_beside_h2d": 0.75, "h2d_beside_attention": 0.8} if copies else {})
    assert Played.begun - before == (copies is not None)
