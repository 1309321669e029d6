"""Several cards, as the probe finds them: which are alike, what their links carry alone and at once, what a hop takes."""

from __future__ import annotations

import contextlib
import threading
import types

import pytest
import torch

from penstock.planner.contract.config.resolve import hardware_from, hardware_mapping
from penstock.planner.contract.given.links import GLOO, Links
from penstock.planner.probe import measure as probing
from penstock.planner.probe.clocked import FULL, QUICK
from penstock.planner.probe.findings import Figure, Findings
from penstock.planner.probe.gpu_rates import Gpu
from penstock.planner.probe.profile_table import _figures
from penstock.planner.probe.runtime_rates import HOPS, measure_hops
from penstock.runtime.timed.rank_times import measure
from tests.planner.test_presets import hardware
from tests.planner.test_probe_products import answering

TOLD = {"alone": [50.0, 50.0, 48.0, 52.0], "together": [[2, 97.0], [4, 160.0]], "hop_s": 7.2e-5, "p2p_gbps": 380.0}
TOLD |= {"free_bytes": [60 * 10**9, 80 * 10**9, 79 * 10**9, 80 * 10**9]}


def probed(monkeypatch, shares=FULL, names=("H100",) * 4) -> Findings:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(name=names[index]))
    gpu = object.__new__(Gpu)
    gpu.name, gpu.index, gpu.context_bytes = "H100", 0, 10**9
    found = Findings("2026-11-23")
    found.add(Figure("gpu.h2d", [[2**20, 48.0], [2**26, 55.0]], "copies"))
    found.add(Figure("vram_bytes", 81 * 10**9, "CUDA"))
    meter = types.SimpleNamespace(say=lambda doing: None)
    probing._measure_links(found, meter, shares, gpu)
    return found


def test_all_cards_of_a_kind_are_found_and_their_links_at_once_are_relative_to_each_alone(monkeypatch):
    asked = answering(monkeypatch, TOLD)
    found = probed(monkeypatch)
    assert asked[0][2:] == ["penstock.runtime.timed.rank_times", "devices=0,1,2,3", "seconds=0.5"]
    assert found.numbers("devices") == [0, 1, 2, 3]
    assert found.number("vram_bytes") == 80 * 10**9, "the least of the others; of its own card this process has taken a part"
    cfg = hardware("h100")
    cfg.devices, cfg.links = [0, 1, 2, 3], probing._links(found)
    made = hardware_from(cfg)
    assert made.links.together.points == ((1, 55.0), (2, 106.7), (4, 176.0)) and made.cards == 4
    assert made.links.share(4, 4 * 55.0) == pytest.approx(0.8) and made.links.hop_s == 7.2e-5
    assert hardware_mapping(made)["links"] == {
        "together_gbps": [[1, 55.0], [2, 106.7], [4, 176.0]],
        "hop_s": 7.2e-5,
        "p2p_gbps": 380.0,
        "word_hop_s": 0.0,
    }
    assert dict(_figures(cfg))["links.together_gbps"].splitlines()[-1] == "4 GPUs 176.0 GB/s"


@pytest.mark.parametrize(("shares", "names", "devices"), [(QUICK, ("H100", "H100"), [0, 1]), (FULL, ("H100", "A2"), [])])
def test_a_quick_probe_counts_cards_alone_and_other_cards_are_no_ranks(monkeypatch, shares, names, devices):
    asked = answering(monkeypatch, TOLD)
    found = probed(monkeypatch, shares, names)
    assert not asked and found.numbers("devices") == devices and probing._links(found) is None


def test_links_that_cannot_be_timed_say_why(monkeypatch):
    answering(monkeypatch, {}, 1, "Traceback\nRuntimeError: NCCL")
    found = probed(monkeypatch)
    assert found.origin["links.together_gbps"] == "not measured: timing the links of all GPUs failed: RuntimeError: NCCL"
    assert probing._links(found) is None


class FakeRank:
    """A card whose link carries 50 GB/s alone, and less beside others; and its seat at the table."""

    free_bytes = 10

    def __init__(self, rank: int, table: Table):
        self.rank, self.count, self.table = rank, table.count, table
        self.hops: list[tuple[int, int | None, bool]] = []
        self.is_busy = False

    def gathered(self, value):
        self.table.values[self.rank] = value
        self.table.barrier.wait(10)
        found = list(self.table.values)
        self.table.barrier.wait(10)
        return found

    def copied_gbps(self, seconds):
        self.table.seconds.append(seconds)
        return 50.0 - self.rank

    @contextlib.contextmanager
    def busy(self):
        self.is_busy = True
        yield
        self.is_busy = False

    def hop(self, nbytes, to):
        self.hops.append((nbytes, to, self.is_busy))


class Table:
    def __init__(self, count: int):
        self.count, self.values, self.barrier = count, [0.0] * count, threading.Barrier(count)
        self.seconds: list[float] = []


def test_all_ranks_measure_in_turn_and_at_once():
    table, told = Table(3), {}
    ranks = [FakeRank(rank, table) for rank in range(3)]
    threads = [threading.Thread(target=lambda one: told.setdefault(one.rank, measure(one, one, 0.4)), args=(one,)) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert told[0] == told[1] == told[2]
    assert told[0]["alone"] == [50.0, 49.0, 48.0] and told[0]["together"] == [[2, 99.0], [3, 147.0]]
    assert sorted(table.seconds) == [0.1] * 3 + [0.4] * 8, "each warms up, 3 alone in turn, 2 and 3 at once"
    sent, received = ([hop for hop in ranks[0].hops if (hop[1] is None) == comes] for comes in (False, True))
    assert len(sent) == len(received) + 2 and {to for _, to, _ in sent} == {1} and not ranks[2].hops
    assert all(busy == (nbytes == 16384) for nbytes, _, busy in ranks[0].hops)


def test_processes_without_cards_hop_by_gloo_and_a_probe_times_it(monkeypatch):
    told = {"alone": [5.0, 5.0], "together": [[2, 8.0]], "hop_s": 1.5e-4, "p2p_gbps": 1.25, "free_bytes": [0, 0]}
    asked = answering(monkeypatch, told)
    found = Findings("2026-11-23")
    found.attempt(HOPS, lambda: measure_hops(0.5))
    assert asked[0][2:] == ["penstock.runtime.timed.rank_times", "devices=cpu,cpu", "seconds=0.5"]
    cfg = hardware("laptop")
    cfg.gpu, cfg.links, cfg.vram_bytes = None, None, 0
    assert hardware_from(cfg).links == GLOO and "links" not in hardware_mapping(hardware_from(cfg))
    cfg.links = probing._links(found)
    made = hardware_from(cfg).links
    assert (made.hop_s, made.p2p_gbps) == (1.5e-4, 1.25)
    assert dict(_figures(cfg))["links.p2p_gbps"] == "1.2 GB/s"
    assert hardware_from(hardware("laptop")).links == Links()
